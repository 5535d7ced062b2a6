"""Measurements of an engine: time by part of the model and by operator, launches, verifying, differences of logits."""
