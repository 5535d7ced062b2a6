"""What inference costs, by arithmetic: FLOPs, bytes, ceilings of devices, and the times that follow from them.

`arithmetic` counts, `devices` and `measure` say what a machine can do, `predict` divides one by the other,
`speculation` adds the draft model, `report` answers a whole question. docs/inference-math.md derives it all;
`nanoinfer roofline gpt2-xl --device h100` prints it. Only `measure` imports torch, and only when it measures.
"""
