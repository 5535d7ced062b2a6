"""Sampling: from logits to the next token of each sequence. Engines do not depend on it."""
