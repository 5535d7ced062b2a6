"""`nanoinfer batch --ray`: the same batch on the nodes of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from nanoinfer.batch.lines import STANDARD
from nanoinfer.cli.options import are_given
from nanoinfer.config import LLMConfig
from nanoinfer.errors import NanoinferError
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.utils.checks import require_int
from nanoinfer.utils.files import escaped

if TYPE_CHECKING:
    from nanoinfer.batch.lines import LineReader
    from nanoinfer.batch.output import FileOutput, StreamOutput
    from nanoinfer.batch.run import BatchOptions
    from nanoinfer.ray.shards import Shards


@dataclass(frozen=True)
class RayFlags:
    """The flags of a batch on a cluster; None: not given."""

    ray: str | None = None
    """Generate on a Ray cluster: HOST:PORT, auto (the one on this machine) or local (start one here)."""
    num_actors: int | None = None
    """Replicas of the model on the cluster (default: as many as its nodes have CPUs for)."""
    cpus_per_actor: int | None = None
    """CPUs of a replica, and its threads (default: those of the smallest node)."""

    def __post_init__(self) -> None:
        for name in ("num_actors", "cpus_per_actor"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 1, 1 << 20)
                if self.ray is None:
                    raise NanoinferError(f"--{name.replace('_', '-')} needs --ray: one process has no actors")

    def has_shards(self, inputs: Sequence[str], output: str) -> bool:
        """Return whether the input is a folder or a URI, or the output. Raises NanoinferError: they do not fit."""
        if self.ray is not None and STANDARD in inputs:
            raise _no_stream()
        found = [name for name in (*inputs, output) if "://" in name or os.path.isdir(name)]
        if self.ray is None or not found:
            if any("://" in name for name in found):
                raise NanoinferError(f"{escaped(found[0])} is a URI: give --ray ADDRESS, or --ray local")
            return False
        if len(inputs) != 1:
            raise NanoinferError(f"{len(inputs)} inputs with {escaped(found[0])}: give one folder or URI of shards")
        return True


def generate(
    cluster: RayFlags,
    config: LLMConfig,
    options: BatchOptions,
    reader: LineReader,
    inputs: Sequence[str],
    records: FileOutput | StreamOutput,
) -> None:
    """Write the records of the lines that the reader has left."""
    if not reader.is_regular:
        raise _no_stream()

    from nanoinfer.ray.connect import connected
    from nanoinfer.ray.pool import run_file
    from nanoinfer.utils.progress import ProgressBar

    assert cluster.ray is not None
    with connected(cluster.ray), ProgressBar("batch", lines=True) as bar:
        run_file(reader, records, _job(cluster, config, options, several=len(inputs) > 1), bar)


def open_shards(source: str, target: str, settings: Mapping[str, Any], overwrite: bool) -> Shards:
    """Return the shards of a batch. Raises NanoinferError: see `Shards`."""
    from nanoinfer.ray.shards import Shards

    return Shards(source, target, settings, overwrite)


def generate_shards(cluster: RayFlags, config: LLMConfig, options: BatchOptions, shards: Shards) -> None:
    """Write the shards that are not complete."""
    from nanoinfer.ray.connect import connected
    from nanoinfer.utils.progress import ProgressBar

    assert cluster.ray is not None
    with connected(cluster.ray), ProgressBar("batch", lines=True) as bar:
        shards.run(_job(cluster, config, options), bar)


def _no_stream() -> NanoinferError:
    return NanoinferError("--ray reads its input in several places: give regular files, no standard input or pipe")


def _job(cluster: RayFlags, config: LLMConfig, options: BatchOptions, **more: Any) -> Any:
    from nanoinfer.ray.pool import Job

    given = tuple(are_given(f.name for f in fields(SamplingParams)))
    return Job(config, options, given, num_actors=cluster.num_actors, cpus_per_actor=cluster.cpus_per_actor, **more)
