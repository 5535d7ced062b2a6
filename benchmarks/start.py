"""How long a process takes from its start to the first token, and how much memory; the size of an installation.

    python benchmarks/start.py                            # nanoinfer, and llama.cpp where it is installed
    python benchmarks/start.py --case shakespeare --rounds 3
    python benchmarks/start.py --large --install --output start.json

The clock starts before the process and stops at the first byte of its output, of a server at its first answer. The
processes of a case take turns; the first turn reads the files into the page cache and does not count. Memory is the
most that was resident (VmHWM, mapped files included). Weights of GPT-2's shapes are random: `--models FOLDER` keeps
them for the next call.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PYTHON = [sys.executable, "-c"]
CLI = "from nanoinfer.cli import main; main()"
GENERATE = ("generate", "ROMEO:", "--max-tokens", "1", "--temperature", "0")
MIB = 1 << 20

# Each program says at its end how much was resident at most. The parent cannot ask the system: it counts the memory of
# the process that forked, too.
_REPORT_PEAK = """
import atexit, sys
def report_peak():
    with open("/proc/self/status") as file:
        print("\\n" + next(line for line in file if line.startswith("VmHWM:")), file=sys.stderr)
atexit.register(report_peak)
del report_peak
"""

# The first answer of a server: arguments of the command line without the port. The client is a thread, which waits.
FIRST_ANSWER = """
import os, signal, socket, sys, threading, time
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
def ask():
    while True:
        try:
            client = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.002)
    body = b'{"prompt": "ROMEO:", "max_tokens": 1, "temperature": 0}'
    head = f"POST /v1/completions HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nConnection: close\\r\\nContent-Length: {len(body)}"
    client.sendall(head.encode() + b"\\r\\n\\r\\n" + body)
    answer = client.makefile("rb").read()
    print(answer if answer.startswith(b"HTTP/1.1 200 ") else "", end="", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=ask, daemon=True).start()
sys.argv += ["--port", str(port)]
from nanoinfer.cli import main
main()
"""
# Hugging Face folder of a model by name, with a tokenizer of GPT-2's size where the model has none of its own.
_WRITE_FOLDER = """
import sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from nanoinfer.checkpoints import huggingface
from nanoinfer.checkpoints.load import load_model
from nanoinfer.tokenizers.tokenizer import to_json
loaded = load_model(sys.argv[1])
if loaded.tokenizer is None:
    tokens, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    letters = [t for t in tokens if t.isalpha() and t.isascii()]
    for left in tokens:  # each new token is one that there is, and a letter
        for right in letters:
            if len(tokens) < loaded.config.vocab_size - 1 and len(left) < 4:
                tokens.append(left + right)
                merges.append((left, right))
    bpe = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    bpe.add_special_tokens(["<|endoftext|>"])
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = bpe.to_str()
else:
    text = to_json(loaded.tokenizer)
huggingface.save(loaded.take(), Path(sys.argv[2]), text)
"""
# The file that llama.cpp loads: quantization, Hugging Face folder.
_EXPORT = """
import sys
from pathlib import Path
from nanoinfer.bench.case import Case
from nanoinfer.bench.backends.llamacpp import LlamaCpp
quantization, folder = sys.argv[1:]
print(LlamaCpp.export(Case("llama.cpp", folder, quantization=quantization or None), Path(folder)))
"""
# The first token of llama.cpp, greedy, after three tokens: its file, threads.
_FIRST_TOKEN = """
import ctypes, sys
import llama_cpp as l
silent = l.llama_log_callback(lambda *_: None)
l.llama_log_set(silent, ctypes.c_void_p(0))
l.llama_backend_init()
options = l.llama_model_default_params()
options.n_gpu_layers = 0
options.use_extra_bufts = False  # of AMX, whose kernels end the process on some virtual machines
model = l.llama_model_load_from_file(sys.argv[1].encode(), options)
options = l.llama_context_default_params()
options.n_threads = options.n_threads_batch = int(sys.argv[2])
context = l.llama_init_from_model(model, options)
tokens = (l.llama_token * 3)(1, 2, 3)
assert l.llama_decode(context, l.llama_batch_get_one(tokens, 3)) == 0
sampler = l.llama_sampler_init_greedy()
print(l.llama_sampler_sample(sampler, context, -1), flush=True)
"""
DISTRIBUTIONS = ("nanoinfer", "llama-cpp-python")


@dataclass(frozen=True)
class Program:
    """A process to start."""

    case: str
    system: str
    code: str
    arguments: Sequence[str]
    target_sec: float | None = None


@dataclass(frozen=True)
class Row:
    """What was measured of a program."""

    case: str
    system: str
    first_byte_sec: float
    """Median."""
    min_sec: float
    max_sec: float
    peak_bytes: int
    """Median."""
    target_sec: float | None


def start(code: str, arguments: Sequence[str]) -> tuple[float, int]:
    """Return the seconds until a Python program prints its first byte, and the most bytes that were resident.

    Raises:
        SystemExit: it printed nothing or failed.
    """
    # Programs are compiled once, as an installation's are: the first process of each is not counted.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile("w+") as err:
        begin = time.perf_counter()
        with subprocess.Popen(
            [*PYTHON, _REPORT_PEAK + code, *arguments], stdout=subprocess.PIPE, stderr=err, env=environment
        ) as process:
            assert process.stdout is not None
            first = process.stdout.read(1)
            seconds = time.perf_counter() - begin
            process.stdout.read()
        err.seek(0)
        said = err.read()
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", said, re.M)
    if not first or process.returncode or peak is None:
        raise SystemExit(f"{' '.join(arguments)}: exit code {process.returncode}\n{said[-2000:]}")
    return seconds, int(peak[1]) * 1024


def measure(programs: Sequence[Program], rounds: int) -> list[Row]:
    """Start programs in turns and return a row for each."""
    results: list[list[tuple[float, int]]] = [[] for _ in programs]
    for _ in range(rounds + 1):
        for program, found in zip(programs, results, strict=True):
            found.append(start(program.code, program.arguments))
    rows = []
    for program, found in zip(programs, results, strict=True):
        seconds, peaks = zip(*found[1:], strict=True)
        times = (statistics.median(seconds), min(seconds), max(seconds))
        rows.append(Row(program.case, program.system, *times, int(statistics.median(peaks)), program.target_sec))
    return rows


class Programs:
    """The programs of each case; makes the models that they load in a folder."""

    def __init__(self, models: Path, threads: int) -> None:
        self._models, self._threads = models, threads

    def help(self) -> list[Program]:
        """The help of the command line."""
        return [Program("nanoinfer --help", "nanoinfer", CLI, ["--help"], 0.15)]

    def shakespeare(self) -> list[Program]:
        """The built-in model, in float32 as the peers have it."""
        case = "shakespeare"
        own = [Program(case, "nanoinfer", CLI, GENERATE, 0.35)]
        if importlib.util.find_spec("uvicorn") is None:
            print(f"{case}: the server is not installed: pip install '.[server]'", file=sys.stderr)
        else:
            own.append(Program(case, "nanoinfer serve", FIRST_ANSWER, ["serve", case], 0.5))
        return [*own, *self._peers(case, self._folder(case, case), "")]

    def gpt2(self) -> list[Program]:
        """GPT-2 124M in int8, from float32 weights and packed."""
        case, folder = "gpt2 124M int8", self._folder("gpt2", "random:gpt2")
        packed = self._packed("gpt2-int8", str(folder), "int8")
        return [
            Program(case, "nanoinfer", CLI, [*GENERATE, "-m", str(folder), "--quantization", "int8"], 0.8),
            Program(case, "nanoinfer, packed", CLI, [*GENERATE, "-m", str(packed)], 0.4),
            *self._peers(case, folder, "Q8_0"),
        ]

    def gpt2_xl(self) -> list[Program]:
        """GPT-2 XL in int4, packed."""
        tokenizer = self._folder("gpt2", "random:gpt2") / "tokenizer.json"
        packed = self._packed("gpt2-xl-int4", "random:gpt2-xl", "int4", "--tokenizer", str(tokenizer))
        return [Program("gpt2-xl int4", "nanoinfer, packed", CLI, [*GENERATE, "-m", str(packed)], 0.6)]

    def _folder(self, name: str, model: str) -> Path:
        if not (folder := self._models / name).exists():
            _run([*PYTHON, _WRITE_FOLDER, model, str(folder)])
        return folder

    def _packed(self, name: str, model: str, quantization: str, *flags: str) -> Path:
        if not (folder := self._models / name).exists():
            _run([*PYTHON, CLI, "pack", model, "--quantization", quantization, "--output", str(folder), *flags])
        return folder

    def _peers(self, case: str, folder: Path, quantization: str) -> list[Program]:
        if importlib.util.find_spec("llama_cpp") is None:
            print(f"{case}: llama.cpp is not installed: pip install '.[peers]'", file=sys.stderr)
            return []
        file = _run([*PYTHON, _EXPORT, quantization, str(folder)]).strip()
        return [Program(case, "llama.cpp", _FIRST_TOKEN, [file, str(self._threads)])]


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def installed_bytes(name: str) -> dict[str, int]:
    """Return the bytes of the distribution `name` and of each that it requires, in this environment, largest first.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    sizes: dict[str, int] = {}
    names = [name]
    while names:
        distribution = metadata.distribution(names.pop())
        key = distribution.metadata["Name"].lower()
        if key in sizes:
            continue
        paths = [Path(str(file.locate())) for file in distribution.files or ()]
        sizes[key] = sum(path.stat().st_size for path in paths if path.is_file())
        for requirement in distribution.requires or ():
            required, _, marker = requirement.partition(";")
            required = re.split(r"[^\w.-]", required.strip())[0]
            if "extra" not in marker and _is_installed(required):  # what this platform does not need is not there
                names.append(required)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _is_installed(name: str) -> bool:
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.distribution(name))
    return False


def show(rows: Sequence[Row]) -> str:
    """Return a table of at most 80 columns."""
    lines = [f"{'model':16} {'system':17} {'first token':>11}  {'from - to':>13} {'peak MiB':>8} {'goal':>6}"]
    for r in rows:
        goal = "" if r.target_sec is None else f"{r.target_sec:.2f} s"
        seconds, spread = f"{r.first_byte_sec:.3f} s", f"{r.min_sec:.3f} - {r.max_sec:.3f}"
        line = f"{r.case:16} {r.system:17} {seconds:>11}  {spread:>13} {r.peak_bytes / MIB:8.0f} {goal:>6}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def show_install(name: str, sizes: dict[str, int]) -> str:
    """Return the installed size and its largest parts in a few lines."""
    parts = ", ".join(f"{part} {size / 1e6:.1f}" for part, size in list(sizes.items())[:6])
    return f"installed, {name}: {sum(sizes.values()) / 1e6:.0f} MB, of which\n  {parts}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--case", action="append", choices=("help", "shakespeare", "gpt2", "gpt2_xl"))
    parser.add_argument("--rounds", type=int, default=10, help="processes of each kind that count (default: 10)")
    parser.add_argument("--large", action="store_true", help="also GPT-2 XL: packing it takes 7 GB of memory")
    parser.add_argument("--install", action="store_true", help="also the installed sizes (nanoinfer as a wheel)")
    parser.add_argument("--models", type=Path, help="folder for the models (default: a temporary one)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(arguments)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    result: dict[str, Any] = {"cpus": cpus, "machine": platform.platform(), "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as temporary:
        programs = Programs(options.models or Path(temporary), cpus)
        rows: list[Row] = []
        for case in options.case or ["help", "shakespeare", "gpt2", *(["gpt2_xl"] if options.large else [])]:
            rows += measure(getattr(programs, case)(), options.rounds)
        print(show(rows))
        result |= {"rounds": options.rounds, "rows": [asdict(r) for r in rows]}
        if options.install:
            result["installed_bytes"] = {n: installed_bytes(n) for n in DISTRIBUTIONS if _is_installed(n)}
            for name, sizes in result["installed_bytes"].items():
                print(show_install(name, sizes))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
