"""Random traffic and abuse on all routes of a server: answers are the library's, /health answers, memory stays flat.

`make soak` runs it for an hour, `make test-all` for a minute. Limits: 1,024 open files, 2 GiB of addresses.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.environment import TESTS

pytest.importorskip("uvicorn", reason="the extra `server` is not installed")
pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
pytest.importorskip("nanoinfer._native", reason="the native extension is not built")

from helpers.health_probe import quantiles
from helpers.server_process import serving
from helpers.soak_traffic import ABUSE, COMPARED, VALID, Abuser, Client, Expected, Server, run
from nanoinfer import LLM
from nanoinfer.checkpoints.load import BUILTIN
from nanoinfer.server.app import ROUTES

MINUTES = float(os.environ.get("NANOINFER_TEST_SOAK_MINUTES", "1"))
IS_LONG = MINUTES >= 30
NUM_CLIENTS, NUM_ABUSERS = 6, 2
OPTIONS = {"engine": "native", "max_num_seqs": 32, "kv_cache_memory": 64 << 20}
LIMITS = "ulimit -n 1024\nulimit -v 2097152 || true"  # KiB
if (os.cpu_count() or 1) > 4:
    LIMITS += "\nexport MALLOC_ARENA_MAX=2"  # glibc reserves 64 MiB of addresses for each thread, and there are many
TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}
{%- for m in messages %}
    {{- '> ' if m.role == 'assistant' else m.role + ': ' }}
    {%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}
        {{- '<call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
        {{- '}</call>' }}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '> ' }}
    {%- if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}
{%- endif %}"""
HEALTH_SEC = 0.2 if IS_LONG else 10.0  # a minute has too few seconds in which the machine does nothing else
SLACK_BYTES = (32 if IS_LONG else 256) << 20  # caches fill in the first minutes


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def probing(server: Server) -> Iterator[dict[str, Any]]:
    """Ask /health all the time; the dict is filled at the end."""
    script = TESTS / "helpers" / "health_probe.py"
    command = [sys.executable, str(script), server.host, str(server.port)]
    probe = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = {}
    try:
        assert probe.stdout is not None
        assert probe.stdout.readline() == "connected\n"
        yield found
        found.update(json.loads(probe.communicate(timeout=150)[0]))
    finally:
        probe.kill()
        probe.wait()


def metrics_of(server: Server) -> dict[str, float]:
    """Return the values of the metrics, by name and labels without the model's."""
    connection = server.connect()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    lines = re.findall(
        r'^nanoinfer:(\w+)\{(?:model_name="\w+",?|([^}]*?),?model_name="\w+",?)(.*?)\} (\S+)$', text, re.M
    )
    return {f"{name} {before}{after}".strip(): float(value) for name, before, after, value in lines}


def test_a_slow_answer_counts_for_all_the_time_that_it_takes() -> None:
    found = quantiles([0.001] * 900 + [1.001])  # one answer in 901, a tenth of the time
    assert found["p50_sec"] == 0.001
    assert found["p99_sec"] == pytest.approx(0.9, abs=0.011)
    assert found["p99.9_sec"] == pytest.approx(0.99, abs=0.02)


def show(server: Server, health: dict[str, Any], sizes: list[int], pid: int) -> None:
    print(f"\n{MINUTES:g} minutes: {dict(sorted(server.counts.items()))}")
    print(f"resident MiB: {[size >> 20 for size in sizes[:: max(1, len(sizes) // 20)]]}")
    peak = re.search(r"VmPeak:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    print(f"address space, peak: {int(peak[1]) >> 10 if peak else 0} MiB")
    print(f"/health: { {name: value for name, value in health.items() if name != 'worst'} }")
    for latency, at in health.get("worst", ()):
        kinds = sorted({kind for kind, begin, end in server.spans if begin <= at + latency and at <= end})
        print(f"  {latency:.3f} s during {', '.join(kinds) or 'no abuse'}")


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_random_traffic_gives_the_answers_of_the_library_in_flat_memory(tmp_path: Path) -> None:
    assert {route.path for route in ROUTES} == set(VALID)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    folder = tmp_path / "chatty"
    shutil.copytree(BUILTIN / "shakespeare", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    expected = Expected(LLM(str(folder), **OPTIONS))  # type: ignore[arg-type]
    options = itertools.chain.from_iterable((f"--{name.replace('_', '-')}", str(v)) for name, v in OPTIONS.items())
    with serving(folder, *options, limits=LIMITS) as process:
        most = re.search(r"connections: (\d+)", process.lines[0])
        assert most is not None
        server, sizes = Server(process.url, int(most[1]), 60 * MINUTES), []
        clients = [Client(server, expected, i) for i in range(NUM_CLIENTS)]
        abusers = [Abuser(server, i) for i in range(NUM_ABUSERS)]
        with probing(server) as health:
            traffic = threading.Thread(target=run, args=(server, [*clients, *abusers]))
            traffic.start()
            while traffic.is_alive():
                sizes.append(resident_bytes(process.process.pid))
                traffic.join(0.3 * MINUTES)
        show(server, health, sizes, process.process.pid)
        assert server.wrong == []
        assert process.process.poll() is None
        end = time.monotonic() + 60
        while (metrics := metrics_of(server))["num_requests_running"] or metrics["num_requests_waiting"]:
            assert time.monotonic() < end
            time.sleep(0.1)
        statuses = {name: count for name, count in metrics.items() if name.startswith("http_responses_total")}
        print(statuses)
        assert [name for name in statuses if re.search(r'status="5(?!03)', name)] == []
        assert [kind for kind in (*VALID, *ABUSE, *COMPARED) if not server.counts[kind]] == []
        assert health["num_lost"] == 0
        assert health["p99.9_sec"] < HEALTH_SEC
        third, last = (max(sizes[i * len(sizes) // 4 : (i + 1) * len(sizes) // 4]) for i in (2, 3))
        assert last <= third + SLACK_BYTES
        # Nothing is reported but the tools of `many_tools` whose reference is not there.
        known = re.compile(r" WARNING tool 'a\d+': the arguments of its calls may be any object: ")
        assert [line for line in process.lines[1:] if not known.search(line)] == []
