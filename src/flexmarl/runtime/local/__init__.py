"""The local runtime: one supervisor, a fork server, a process per instance and process group. Read `supervisor.py`.

This module imports nothing, so that the fork server starts with as little as it needs.
"""
