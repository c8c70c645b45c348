"""Vocabulary shared by every layer: ids, records, errors, messages, events and the protocols of the seams.

Read `records.py` first, then `protocols.py`. This package imports the standard library only.
"""
