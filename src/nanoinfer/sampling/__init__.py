"""Sampling: from logits to the next token of each sequence. No engine knows any of it."""
