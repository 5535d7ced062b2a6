"""Code close to the machine: `cpu/` in C++, `triton/` for GPUs. Nothing of ours is imported here."""
