"""Scheduling: which sequences run in the next step, and how many tokens of each. It does not import PyTorch."""
