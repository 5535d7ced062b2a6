"""GGUF files: read, described in both directions, written; their tokenizers."""
