"""The orchestrator: one inbox, one step at a time, one version for all policies. Start with `run.py`.

It decides; engines, store and runtime do. It is ordinary asyncio code and does not know which runtime it is on.
"""
