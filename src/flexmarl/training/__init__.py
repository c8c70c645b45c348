"""The training engine: process groups that hold one policy's state each, and the engine that gives them work.

Start with `engine.py`, then `trainer.py`, which drives one policy; `work.py` names its kinds of work and their modules.
`process_group.py` is the content of one worker process.
"""
