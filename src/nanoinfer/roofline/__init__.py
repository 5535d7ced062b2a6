"""Roofline model of inference: FLOPs, bytes, ceilings of devices, and the predicted times.

`arithmetic` counts FLOPs and bytes, `ceilings` and `measure` give the peaks of a device, `predict` computes times, and
`report` combines them. docs/inference-math.md has the derivations;
`nanoinfer roofline gpt2-xl --device h100` prints a report. Only `measure` imports torch, to measure a GPU.
"""
