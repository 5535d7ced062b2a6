"""The engines: the rungs of the ladder. All implement the interface in `base.py`."""
