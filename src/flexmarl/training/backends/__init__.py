"""Training backends: `scripted` (no torch) and `torch`. Each implements `core.protocols.TrainingBackend`."""
