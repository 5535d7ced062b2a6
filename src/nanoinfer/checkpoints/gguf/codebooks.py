"""The codebooks of the formats IQ2_S, IQ3_XXS and IQ3_S of GGUF files.

A code of a block stands for 4 or 8 magnitudes, each one of a few levels; bits say which are negative. The codebooks are
those of ggml (ggml-common.h: iq2s_grid, iq3xxs_grid, iq3s_grid): their entries, read as numbers whose first digit is
the lowest, ascend, so that their differences are stored here.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Codebook:
    """The magnitudes of each code.

    Args:
        levels: the values that a magnitude may have.
        count: magnitudes of a code.
        packed: the differences of the entries' numbers, one byte each, compressed, in base 85.
    """

    def __init__(self, levels: tuple[int, ...], count: int, packed: str) -> None:
        numbers = np.cumsum(np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8), dtype=np.int64)
        digits = numbers[:, None] // len(levels) ** np.arange(count) % len(levels)
        self._magnitudes = np.array(levels, np.float32)[digits]

    def values(self, codes: NDArray[Any], negative: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the values of blocks: codes (num_blocks, codes), and a bit for each value (num_blocks, values)."""
        magnitudes: NDArray[np.float32] = self._magnitudes[codes].reshape(negative.shape)
        return np.where(negative == 1, -magnitudes, magnitudes)


IQ2_S = Codebook((8, 25, 43), 8, (
    "c-nna!D_=W3>`)YVT=(bgiyjLVT4jf4<+QV<Gx|vutWd<1180>W2fl?O=U}cdhbbnGsOc>-w3cJF{L0LaJ@l_1s(v1b{Ofw;)l5ecGzfFpcr"
    "Gw9ZMQOKH>qzLJHPMXa~17hguKRt!t6Xo0X49k`I@iUy!UXFl5T7q>WOt%T?T34E|E85(q+qs7Rf}2t!WkbcRdE_su-?a^f*^J_%|3YF+P4b"
    "09QM0im3v$)1$>dX2D=f9ct?6)GTXL|aTQu6b8xy_eT~ym;$O{&AX3f0W*$UJaV_nXH;M^R>zA5k*#<*bA>SK>-qoJ%5YAm&TobK53l?U|K?"
    "4mZ#z^>~y*k+!9GT;z*5_&T)VvnXa8$;{ruIEM+exG)j1forhPTGY=|vG6Ot<{t<PZM(o=GWs}}P7YW1Qk$)$?-<sZ710T&F)7KfH"
))  # fmt: skip
IQ3_XXS = Codebook((4, 12, 20, 28, 36, 44, 52, 62), 4, (
    "c-kF}K~ID*6ol>Y=mSb06<WIncY$3=(2yAM>`lE9|Np<Sc$j2nGWq5X$UzERK7x{E%D|>BQq5pcrG>PDxph7_HAr{vBYHv*cdV0O)CtUZJ2G"
    "E2q_ob^ZK1ZScNzajl$8UJ(A<+MzzJ!U^-L>Ga`ILG4HKV^$6)gVVbCMD!8Pq?(`jAzLmQUhji9F8H_GYz%P^Zs!k$647z^#<AY<`zPTxiRU"
    "1f8S^LUw`_0KfFFR}rub!+w7=MPrG<OZ}~fB7vBnE"
))  # fmt: skip
IQ3_S = Codebook((1, 3, 5, 7, 9, 11, 13, 15), 4, (
    "c-keA+fKtk3`E)SE%DwGn$m`XR8*u2-Vy)*XL!rgt}T1!*nUchkWvDWSOpXxff0=yCnjRBRTfQ*L=h6}D5^9m6AYw`3Z~5QRnqP#h<ZksOlW"
    "I2JTjHHhvu*f2Q<*EDI8gh)X)@8gF?y42SVs2mQ`~gRalT5AC>*iRB;)gg;$;aB{8HzdAv2IA}9_1=r|KO#Ng~P5Ai%&wPl^jh<7rXYsz(k_"
    "#1Crk>%Bfpp9)1TqnQ+VsVZjCftoB+-9)0Nri1yt`>dn^>DZbZob7N;cvFMM7K(W8${TplNK2ae8Y22dx3xK>voo$b=Q!Lz7p36=J~3#i`J8"
    "*UZuoxikHuF!0#39cWm~!EcX8LtXXs_(tlcSv~S1D7k-%LC@8vE?syxQvvogHdx=w@znAOj{s-R}55W"
))  # fmt: skip
