"""The rollout engine: instances that generate, and the manager that spreads requests over them.

Start with `manager.py`; `instance.py` is the content of one worker process.
"""
