"""How weights are stored: bytes of a matrix, of a vector, and of one cached value, by format.

    float32                4 bytes a value, keys and values too
    bfloat16, float16      2 bytes a value, keys and values too
    int8                   rows * columns + 2 * rows                        one 16-bit scale for each output row
    int4                   rows * (ceil(columns / 2) + 2 * ceil(columns / 32))    one for each group of 32 in a row

Under int8 and int4 all that is no matrix (biases, layer norms, keys, values) stays at 16 bits, and the
arithmetic is done in floating point: the weights are widened on the way. int4 is 4.5 bits a weight, as in
llama.cpp's Q4_0. A format with zero points, or with the output head left wide, has another formula.
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
    """Bytes of one value that is no matrix weight: bias, layer norm, scale, key, value, activation."""
    group_size: int | None = None
    """Weights of a row that share a scale; 0: the whole row; None: no scales."""

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight matrix, (rows, columns) = (outputs, inputs), scales included.

        FORMATS["int4"].matrix_bytes(1, 64)  ->  36   (32 bytes of weights, 2 scales of 2 bytes)
        """
        data = rows * -(-columns * self.bits // 8)
        if self.group_size is None:
            return data
        groups = -(-columns // (self.group_size or columns))
        return data + rows * groups * self.vector_bytes

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
        WeightFormat("int8", 8, 2, group_size=0),
        WeightFormat("int4", 4, 2, group_size=32),
    )
}
