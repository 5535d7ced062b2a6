"""Triton kernels of a decode step on a GPU. This package imports no other module of nanoinfer.

    quantize.py    packs weights in 8 and 4 bits, and unpacks them (PyTorch only)
    products.py    layer norm, matrix product, bias, GELU, residual, store of keys and values in one launch
    attention.py   attention over the KV cache, split over the context
    rows.py        embedding sum, final layer norm
    sampler.py     samples the next token of each row without a sort (thresholds: sampler_search.py)
    tiles.py       tile sizes

Kernels are launched on the current device, which must be the device of the tensors.

Without a GPU, `TRITON_INTERPRET=1` (set before triton is imported) runs the kernels in Python on the CPU. The tests
check their values in this way.
"""
