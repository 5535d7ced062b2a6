"""Triton kernels of a decode step on a GPU. This package imports no other module of nanoinfer.

Kernels are launched on the current device, which must be the device of the tensors. Without a GPU, `TRITON_INTERPRET=1`
(set before triton is imported) runs the kernels in Python on the CPU. The tests check their values in this way.
"""
