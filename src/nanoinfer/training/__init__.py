"""Training: data, and the loop that made the built-in models."""
