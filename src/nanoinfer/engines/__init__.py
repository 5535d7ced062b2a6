"""Engines: the rungs of the ladder, each behind the one interface of `base.py`."""
