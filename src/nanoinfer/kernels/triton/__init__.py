"""Triton kernels of a decode step on a GPU; nothing of ours is imported here, and Triton only by the modules.

    quantize.py    weights in 8 and 4 bits: packing, and back (torch only)
    products.py    layer norm, matrix product, bias, GELU, residual, store of keys and values: one launch
    attention.py   attention over the cache, split over the context
    rows.py        embedding sum, final layer norm
    sampler.py     the next token of each row, without a sort (borders: sampler_search.py)

Kernels are launched on the current device: it must be the one of the tensors.

Where there is no device, `TRITON_INTERPRET=1` (set before triton is imported) runs them on the CPU, in Python: that is
how the tests check their values.
"""
