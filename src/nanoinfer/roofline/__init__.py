"""Roofline model of inference: FLOPs, bytes, ceilings of devices, and the predicted times.

`arithmetic` counts FLOPs and bytes, `ceilings` has the peaks of devices and measures this machine's, and `report`
predicts times. docs/inference-math.md has the derivations; `nanoinfer roofline gpt2-xl --device h100` prints a report.
Only `ceilings` imports torch, to measure a GPU.
"""
