"""A policy's folder: its model, the flat layout of its parameters, its tokenizer. Start with `flat.py`.

Importing this package imports neither torch nor transformers; the functions that need them do.
"""

from flexmarl.models.export import export_model
from flexmarl.models.flat import FlatParameters
from flexmarl.models.folder import context_length, resolve_model_folder, shipped_models
from flexmarl.models.load import load_causal_lm, new_causal_lm
from flexmarl.models.scripted import ScriptedTokenizer
from flexmarl.models.tokenizer import ChatTokenizer, load_tokenizer

__all__ = [
    "ChatTokenizer",
    "FlatParameters",
    "ScriptedTokenizer",
    "context_length",
    "export_model",
    "load_causal_lm",
    "load_tokenizer",
    "new_causal_lm",
    "resolve_model_folder",
    "shipped_models",
]
