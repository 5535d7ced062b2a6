"""Tokenizers, incremental text, and chat templates."""
