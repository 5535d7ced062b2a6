"""Checkpoints: load weights, config and tokenizer of a model by name; save a model to a folder."""
