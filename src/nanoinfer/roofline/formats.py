"""How weights are stored: bytes of a matrix, of a vector, and of one cached value, by format.

    float32                4 bytes a value, keys and values too
    bfloat16, float16      2 bytes a value, keys and values too
    int8                   rows * columns + 4 * rows                        a 32-bit scale for each output row
    int4                   rows * (ceil(columns / 2) + 3 * ceil(columns / 64))    for each group of 64 in a row a
                           16-bit scale and an 8-bit zero point: 4.4 bits a weight

int8 and int4 are the native engine's formats; the output head is stored like all else. Biases and layer norms stay
wide (a thousandth of the model). Under them a key or value takes a byte, and each head of them a 32-bit scale.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightFormat:
    """One way to store weights."""

    name: str
    bits: int
    """Bits of one weight in a matrix, its scale apart."""
    vector_bytes: int
    """Bytes of one value that is no matrix weight: bias, layer norm, activation; key and value, without cache_bytes."""
    group_size: int | None = None
    """Weights of a row that share a scale; 0: the whole row; None: no scales."""
    group_bytes: int = 0
    """Bytes of a group's scale, and of its zero point where it has one."""
    cache_bytes: int | None = None
    """Bytes of one key or value; None: vector_bytes."""
    cache_scale_bytes: int = 0
    """Bytes of the scale that one head's key, or value, of one token has."""

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
        """Whether weights are stored in the dtype that they are computed in."""
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
