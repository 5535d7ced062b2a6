"""Checkpoints: from a model's name to weights, a config and a tokenizer, and back to a folder."""
