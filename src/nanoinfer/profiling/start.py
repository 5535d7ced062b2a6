"""Profile the start: a new process imports what `nanoinfer generate` does, loads a model and generates one token."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
from itertools import pairwise

from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.inputs.prompts import Prompt
from nanoinfer.sampling_params import SamplingParams

_CHILD = """
import sys, time
times = [float(sys.argv[1]), time.time()]
import nanoinfer.cli.generate, nanoinfer.entrypoints.llm, pickle
config, prompts, params = pickle.load(sys.stdin.buffer)
times.append(time.time())
llm = nanoinfer.entrypoints.llm.LLM.from_config(config)
times.append(time.time())
llm.generate(prompts, params)
times.append(time.time())
print("\\n", times)
"""
PARTS = ("interpreter", "imports", "load", "first step")


def profile_start(config: LLMConfig, prompts: Prompt, params: SamplingParams) -> dict[str, float]:
    """Return the seconds of each of PARTS, from the start of a process to its first token.

    Raises:
        NanoinferError: the process failed, as it says.
    """
    given = pickle.dumps((config, prompts, params))  # for this program's own child
    command = [sys.executable, "-c", _CHILD, str(time.time())]
    done = subprocess.run(command, input=given, capture_output=True, check=False)
    if done.returncode:
        raise NanoinferError(done.stderr.decode(errors="replace").splitlines()[-1].partition(": ")[2])
    times = json.loads(done.stdout.splitlines()[-1])
    return {part: after - before for part, (before, after) in zip(PARTS, pairwise(times), strict=True)}
