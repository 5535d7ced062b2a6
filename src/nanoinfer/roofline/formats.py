"""Weight formats: bytes of a matrix, of a vector, and of a value in the KV cache.

    float32                4 bytes per value, including the KV cache
    bfloat16, float16      2 bytes per value, including the KV cache
    int8                   rows * columns + 4 * rows                        a 32-bit scale per output row
    int4                   rows * (ceil(columns / 2) + 3 * ceil(columns / 64))    a 16-bit scale and an 8-bit zero point
                           per group of 64 weights in a row: 4.4 bits per weight

int8 and int4 are the formats of the native engine; they include the output head. Biases and layer norms, a thousandth
of the model, are stored in float32. The KV cache then has 1 byte per value and a 32-bit scale per token, head, and key
or value.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightFormat:
    """A storage format of weights."""

    name: str
    bits: int
    """Bits of one weight in a matrix, without its scale."""
    vector_bytes: int
    """Bytes of a value that is not a matrix weight: bias, layer norm, activation."""
    group_size: int | None = None
    """Weights of a row that share a scale; 0: the whole row; None: no scales."""
    group_bytes: int = 0
    """Bytes of a group's scale and, if it has one, its zero point."""
    cache_bytes: int | None = None
    """Bytes of a value in the KV cache; None: vector_bytes."""
    cache_scale_bytes: int = 0
    """Bytes of the scale of one head's key, or value, of one token."""

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight matrix, (rows, columns) = (outputs, inputs), scales included.

        FORMATS["int4"].matrix_bytes(1, 128)  ->  70   (64 bytes of weights, 2 groups of 3 bytes)
        """
        data = rows * -(-columns * self.bits // 8)
        if self.group_size is None:
            return data
        groups = -(-columns // (self.group_size or columns))
        return data + rows * groups * self.group_bytes

    @property
    def is_float(self) -> bool:
        """Whether the weights are stored in a floating-point dtype, without scales."""
        return self.group_size is None


FORMATS: dict[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat("float32", 32, 4),
        WeightFormat("bfloat16", 16, 2),
        WeightFormat("float16", 16, 2),
        WeightFormat("int8", 8, 4, group_size=0, group_bytes=4, cache_bytes=1, cache_scale_bytes=4),
        WeightFormat("int4", 4, 4, group_size=64, group_bytes=3, cache_bytes=1, cache_scale_bytes=4),
    )
}
