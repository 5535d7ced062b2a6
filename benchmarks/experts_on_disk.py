"""Time the tokens of a model whose packed file memory cannot hold, and count what they read (docs/experts.md).

    nanoinfer pack MODEL --quantization int4 --output FOLDER
    docker run --memory 600m ... python benchmarks/experts_on_disk.py FOLDER  # or another group with a limit

Linux. It prints what `nanoinfer` says about the memory, then ms a token (median), MB read a token, and GB/s.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from nanoinfer import LLM
from nanoinfer.engines.base import StepBatch


def bytes_read() -> int:
    """Return what this process has read from disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a packed folder")
    parser.add_argument("--tokens", type=int, default=25, metavar="N", help="tokens to time (default: 25)")
    args = parser.parse_args()
    engine = LLM(args.folder, engine="native", max_num_seqs=1, max_model_len=256, kv_cache_memory=2**25).engine
    handle = engine.open()
    ids = np.random.default_rng(5).integers(0, engine.config.vocab_size, args.tokens + 1).tolist()
    engine.extend(StepBatch([handle], ids[:1], [1], [1]))
    seconds, before = [], bytes_read()
    for token in ids[1:]:
        start = time.perf_counter()
        engine.extend(StepBatch([handle], [token], [1], [1]))
        seconds.append(time.perf_counter() - start)
    read = bytes_read() - before
    print(
        f"{statistics.median(seconds) * 1e3:.0f} ms a token, {read / args.tokens / 1e6:.0f} MB read a token,"
        f" {read / sum(seconds) / 1e9:.2f} GB/s"
    )


if __name__ == "__main__":
    main()
