"""Benchmarks: backends in processes of their own, interleaved, checked before they are timed."""
