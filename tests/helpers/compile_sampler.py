"""Compile the sampler's kernels for a compute capability, without such a GPU: one line a kernel.

Run: python tests/helpers/compile_sampler.py 90
Prints: name, bytes of stack, bytes of shared memory, number of operations that the assembler may fuse,
whether the kernel waits for its predecessor before its first access to memory
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoinfer.kernels.triton import sampler
from nanoinfer.sampling.triton import NUM_WARPS

TYPES = {
    "logits": "*fp32", "stride": "i32", "slots": "*i64", "wanted": "*i64", "stride_slots": "i32", "words": "*i64",
    "lists": "*i64", "state": "*i16", "values": "*fp64", "largest": "*fp64", "best": "*i32", "weights": "*fp64",
    "nearest": "*fp64", "sums": "*fp64", "groups": "*i32", "tokens": "*i64", "last": "*i64", "owners": "*i64",
    "stride_owners": "i32", "V": "i32", "num_parts": "i32", "PARTS": "constexpr", "PDL": "constexpr",
}  # fmt: skip
GPT2_PARTS = 32


def main(capability: int) -> None:
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for name, num_warps in NUM_WARPS.items():
        kernel = getattr(sampler, name)
        names = kernel.arg_names
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if TYPES[n].startswith("*")}
        pdl = capability >= 90
        constants = {(names.index("PARTS"),): GPT2_PARTS, (names.index("PDL"),): pdl}
        source = ASTSource(kernel, {n: TYPES[n] for n in names}, constants, aligned)
        options = {"num_warps": num_warps, "enable_fp_fusion": False, "launch_pdl": pdl}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run([cuobjdump, "--dump-resource-usage", file.name], capture_output=True, text=True)
        (stack,) = re.findall(r"STACK:(\d+)", usage.stdout)
        open_to_fusion = len(re.findall(r"\b(?:mul|add|sub)\.f64", compiled.asm["ptx"]))  # .rn forbids it
        first = re.search(r"griddepcontrol\.wait|\b(?:ld|st)\.global", compiled.asm["ptx"])
        waits = first is not None and first[0] == "griddepcontrol.wait"
        print(name, stack, compiled.metadata.shared, open_to_fusion, waits)


if __name__ == "__main__":
    main(int(sys.argv[1]))
