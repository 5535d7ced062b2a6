"""Models: the reference GPT, checkpoint loaders and savers, tokenizers, and the built-in weights."""
