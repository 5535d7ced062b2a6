"""The KV cache: how much memory it takes, and its layout in slots."""
