"""Models: the reference `Transformer`, the families as data, presets, poolings and the built-in weights."""
