"""Helpers that know nothing of models: checks of values, files, host arrays, processes, threads."""
