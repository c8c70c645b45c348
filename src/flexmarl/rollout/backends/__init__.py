"""Inference engines. Start with `transformers.py`, the embedded engine; `scripted.py` is the one without a model."""
