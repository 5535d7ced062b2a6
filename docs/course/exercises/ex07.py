"""Exercises of lesson 7, fewer bits. `pytest docs/course/exercises/test_07.py` checks them."""

from importlib import import_module

import torch

bits = import_module("07_fewer_bits")  # quantize, QuantizedLinear, GROUP


@torch.inference_mode()
def divergence(model, other, tokens):
    """Return how far the predictions of another model are from a model's: the mean KL divergence, in nats per token.

    At each position of the text, sum p(x) * (log p(x) - log q(x)) over the tokens x of the vocabulary, where p are the
    probabilities of `model` and q those of `other`; then take the mean over the positions.

    Args:
        model, other: as of `model.load`, or of `bits.quantize`; `model(idx, pos, attend)` with the attend of rung 1.
        tokens: list of token ids.

    Returns:
        float, 0 or more.
    """
    raise NotImplementedError


def quantize_with_minimum(w, group):
    """Round weights to 4 bits with a scale and a minimum for each group, w = scale * code + minimum, code 0 to 15.

    Rung 7 has codes from -7 to 7 on both sides of 0. A group whose weights are not centred at 0 leaves levels unused;
    here the smallest weight of a group is code 0, and the largest is code 15. (This is Q4_1 of GGUF files.)

    Args:
        w: (out, in) float32; `group` divides `in`.
        group: weights of a row that share scale and minimum. All may be equal.

    Returns:
        codes: (out, in / 2) uint8. Byte i of a row has the codes of weights 2 i (its lower 4 bits) and 2 i + 1.
        scale, minimum: (out, in / group) float32.
    """
    raise NotImplementedError


@torch.inference_mode()
def multiply_codes(x, linear):
    """Return the output of a `QuantizedLinear` of 8 bits without unpacking its weights to floats.

    A row of x has a scale, too: s = (largest absolute value) / 127, codes = round(row / s). Then output o of the row is

        s * linear.scale[o] * (sum over i of codes[i] * linear.codes[o, i]) + linear.bias[o]

    and the sum is one of integers, which is exact, whatever its order. (The engine `native` has a scale for every 64
    inputs of a row.) A row of zeros has the output linear.bias.

    Args:
        x: (N, in) float32.
        linear: codes (out, in) int8, scale (out, 1), bias (out) or None. A sum may exceed 16 bits.

    Returns:
        (N, out) float32.
    """
    raise NotImplementedError
