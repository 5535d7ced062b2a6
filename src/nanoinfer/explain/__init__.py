"""A recording of a generation, step by step, as a page that needs no network."""
