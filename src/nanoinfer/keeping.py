"""The engine's side of kept sequences (scheduling/kept.py): keep finished sequences, make room for others."""

from __future__ import annotations

from nanoinfer.engines.base import Engine, Handle
from nanoinfer.scheduling.kept import KeptSequence
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Sequence


def make_room(engine: Engine, scheduler: Scheduler, num_tokens: int = 0, num_seqs: int = 0) -> None:
    """Close the kept sequences whose room the running ones need, or `num_seqs` more of `num_tokens` tokens."""
    for handle in scheduler.evict(num_tokens, num_seqs):
        engine.close(Handle(handle))


def release(engine: Engine, scheduler: Scheduler, kept: KeptSequence) -> None:
    """Close a kept sequence; one that is in use is closed when its request ends."""
    kept.released = True
    if kept in scheduler.kept:
        engine.close(Handle(scheduler.kept.pop(kept)))


def close_or_keep(engine: Engine, scheduler: Scheduler, s: Sequence) -> None:
    """Close the handle of a finished sequence, or keep it open with the tokens that belong to the sequence."""
    assert s.handle is not None
    kept, handle = s.request.kept, Handle(s.handle)
    if kept is None or kept.released or s.error is not None or kept in scheduler.kept:
        engine.close(handle)
        return
    length = min(engine.length(handle), len(s.token_ids) - s.start)  # the engine may have tokens after the end
    engine.truncate(handle, length)
    scheduler.kept.add(kept, handle, s.token_ids[s.start : s.start + length])
