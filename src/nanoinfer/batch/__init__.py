"""Batch files: read lines, generate for a bounded window of them, write records in order, resume after a kill."""
