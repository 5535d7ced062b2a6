"""The scheduler: which sequences run in the next step, and how many tokens of each.

    waiting --admit--> running --finish--> idle, in the prefix cache
       ^                  |  each step: the tokens that are not in the KV cache yet
       '---- preempt -----'  (a prompt, a chunk of one, one token, or a window that slid)

Rules:
- Sequences are admitted by priority, then preempted ones before new ones, then first come, first served, by what is
  free now: slots for all sequences of the request, and blocks for the part of its prompt that no other sequence
  shares, beside what the running ones need to go on. A request whose prompt is being processed by another one waits for
  it, and later ones may pass it.
- Every decoding sequence runs in every step. The rest of `max_num_batched_tokens`, but at least a quarter of it, is
  spent on prefills (prompts, windows that slid) in chunks, the sequence whose last token is oldest first. While
  streamed requests decode, these chunks are what fits into a step of `target_step_ms` (work.py). So every
  sequence progresses, and a long prompt does not stall the others.
- If the step of a sequence needs blocks, idle sequences are closed. If that is not enough, the last running sequence in
  the order of admission is preempted: it is idle, waits, and goes on with what is left of it. Its tokens do not change.
- A sequence samples a token in the step that processes its last uncached token.

The scheduler uses no tensors, and of an engine only its methods and its capacity. Tests use a fake engine.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection
from collections.abc import Sequence as Seq

from nanoinfer.config import SchedulerConfig
from nanoinfer.engines.base import Engine
from nanoinfer.errors import NanoinferError, QueueFull
from nanoinfer.scheduling.prefix_cache import MIN_WAIT, Entry, PrefixCache
from nanoinfer.scheduling.sequence import Request, Sequence
from nanoinfer.scheduling.work import PrefillLimit, ScheduledSequence, SchedulerStats, StepBudget, sampling_sequences

_MAX_LOOKUPS = 4
"""Waiting sequences that a step looks up in the prefix cache, for each that the engine can run."""


class Scheduler:
    """Decides the work of each step. Call `add`, then `schedule` and `postprocess` while `unfinished`.

    Args:
        engine: its limits, its free blocks, and the verbs that do not compute: open, fork, truncate, close.
        config: the size of a step, the length of the queue, and whether prefixes are shared.
    """

    def __init__(self, engine: Engine, config: SchedulerConfig | None = None) -> None:
        self.config = config or SchedulerConfig()
        self.limits = engine.limits
        self._engine = engine
        self.cache = PrefixCache(engine, self.config.enable_prefix_caching)
        self.stats = SchedulerStats()
        self.prefill_limit = PrefillLimit(self.config.target_step_ms)
        self._waiting: list[Sequence] = []  # in the order of `_rank`; siblings that were never admitted are not in it
        self._running: list[Sequence] = []  # in the order of `_rank`
        self._preempted: list[Sequence] = []  # since `take_preempted`
        self._step = 0

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    @property
    def running(self) -> list[Sequence]:
        """The admitted sequences that are not finished."""
        return list(self._running)

    @property
    def adapters(self) -> set[int]:
        """The adapters of the unfinished requests, as the engine numbers them; 0 stands for none."""
        return {s.request.adapter for s in (*self._waiting, *self._running)}

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait, and of sequences that were preempted."""
        return len(self._waiting)

    @property
    def handles(self) -> set[int]:
        """Handles of the engine's sequences of running and idle sequences."""
        return {s.handle for s in self._running if s.handle is not None} | set(self.cache.idle)

    def add(self, *requests: Request) -> None:
        """Queue requests that passed `Request.check`.

        Raises QueueFull, and queues none of them, if more than max_num_queued would find no slot.
        """
        limit, num_slots = self.config.max_num_queued, max(0, self.limits.max_num_seqs - len(self._running))
        if limit is not None and len(self._waiting) + len(requests) > limit + num_slots:
            raise QueueFull(
                f"{len(self._waiting)} requests wait for {num_slots} places, and {len(requests)} more would exceed"
                f" max_num_queued={limit}: try again later, or raise it"
            )
        for request in requests:
            insort(self._waiting, request.sequences[0], key=_rank)

    # Admission -------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting sequences in their order, until one finds no slot or too few free blocks."""
        reserved: int | None = None  # blocks that the running sequences need to continue
        for s in self._waiting[: _MAX_LOOKUPS * self.limits.max_num_seqs]:
            if s.awaits_beams:
                continue
            if not self._may_find_slot(s):
                return
            entry, num_shared = self._find_prefix(s)
            if entry is not None and num_shared >= entry.num_cached + MIN_WAIT:
                continue  # another sequence is processing it
            if not self._has_slot(s):
                if not self._preempt_for_slot(s):
                    return
                entry, num_shared = self._find_prefix(s)  # those that were preempted are idle, and can be shared
                reserved = None
            self._open(s, entry, num_shared)
            reserved = self._free_blocks_to_start(s, reserved)
            if reserved is None:
                self.cache.retire(s)
                s.num_cached = 0
                if not self._running:
                    raise NanoinferError("the KV cache has no room: sequences of another scheduler are open in it")
                return
            self._start(s)

    def _has_slot(self, s: Sequence) -> bool:
        """Return whether there are slots for a waiting sequence, and for its siblings if it is new."""
        return len(self._running) + (1 if s.admitted else len(s.request.sequences)) <= self.limits.max_num_seqs

    def _may_find_slot(self, s: Sequence) -> bool:
        """Return whether there is a slot, or a running sequence that may be preempted for it."""
        if self._has_slot(s):
            return True
        last, own = self._running[-1].request.priority, s.request.priority
        return last > own or (last == own and _may_preempt_equals(s))

    def _preempt_for_slot(self, s: Sequence) -> bool:
        """Preempt running sequences until there is a slot; return whether there is one."""
        while not self._has_slot(s):
            if not self._preempt_last(s, same_priority=_may_preempt_equals(s)):
                return False
        return True

    def _find_prefix(self, s: Sequence) -> tuple[Entry | None, int]:
        """Return the sequence that shares the longest prefix with a waiting one, and the length of that prefix."""
        window, reads = s.token_ids[s.next_start :], s.request.prompt_reads
        if reads is not None and reads.num_unread:  # logits that are read are computed
            window = window[: reads.next + 1]
        return self.cache.find(window, s.request.cache_key)

    def _open(self, s: Sequence, entry: Entry | None, num_shared: int) -> None:
        """Open the engine's sequence of a waiting one, with what it shares."""
        num_shared = self._engine.cut(entry.handle, min(num_shared, entry.num_cached)) if entry is not None else 0
        self.cache.open(s, s.token_ids[s.next_start :], entry, num_shared)
        s.start, s.num_cached = s.next_start, num_shared

    def _free_blocks_to_start(self, s: Sequence, reserved: int | None) -> int | None:
        """Free the blocks of an opened sequence, beside the `reserved` ones that the running ones need to continue.

        Return the number reserved with it; None if too few can be freed. `reserved` is None if it must be counted.
        """
        if reserved is None:
            reserved = self.cache.reserved_for(self._running)
        while not self.cache.free_blocks(s, s.num_uncached, reserved):
            if not self._preempt_last(s, same_priority=_may_preempt_equals(s)) and not self._preempt_beam(s):
                return None
            reserved = self.cache.reserved_for(self._running)
        return reserved + self.cache.blocks_to_continue(s)

    def _start(self, first: Sequence) -> None:
        """Move an opened sequence, and its siblings if it is new, from the waiting to the running ones."""
        request = first.request
        new = [first] if first.admitted else request.sequences
        if not first.admitted:
            request.num_cached_tokens = min(first.num_cached, len(request.prompt_token_ids))
            self.stats.num_prompt_tokens += len(first.token_ids) - first.start
            self.stats.num_shared_tokens += first.num_cached
        for s in new:
            s.admitted, s.last_sampled_step = True, self._step
            insort(self._running, s, key=_rank)
        self._waiting.remove(first)

    def _preempt_last(self, winner: Sequence, *, same_priority: bool, planned: Collection[Sequence] = ()) -> bool:
        """Preempt the last running sequence that comes after `winner`; return whether there was one.

        It has the same priority only if `same_priority`, and is not one of `planned`, which are part of the step."""
        for s in reversed(self._running):
            if _rank(s) <= _rank(winner) or (s.request.priority == winner.request.priority and not same_priority):
                return False
            if s.handle is not None and not s.num_inflight_tokens and s not in planned:
                self._preempt(s)
                return True
        return False

    def _preempt(self, s: Sequence) -> None:
        """Leave a running sequence to the prefix cache and let it wait."""
        unforked = [other for other in s.request.sequences if other.admitted and other.awaits_fork]
        s.admitted = not unforked  # all of them are admitted together again
        s.awaits_beams = s.request.beams is not None and not s.num_uncached  # its logits were read
        insort(self._waiting, s, key=_rank)  # before it is removed: an interrupt must not lose it
        self._running.remove(s)
        for other in unforked:
            other.admitted = False
            self._running.remove(other)
        self.cache.retire(s)
        s.num_cached = 0
        self._preempted.append(s)
        self.stats.num_preempted += 1

    def take_preempted(self) -> list[Sequence]:
        """Return the sequences that were preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def can_open(self, num_tokens: int) -> bool:
        """Return whether one more sequence of `num_tokens` tokens can be opened now, closing idle ones if needed."""
        if len(self._running) >= self.limits.max_num_seqs or not self.cache.free_slots(1):
            return False
        handle, reserved = self._engine.open(), self.cache.reserved_for(self._running)
        try:
            while self._engine.num_free_blocks < reserved + self._engine.blocks_needed(handle, num_tokens):
                if not self.cache.close_oldest():
                    return False
            return True
        finally:
            self._engine.close(handle)

    # A step ----------------------------------------------------------------------------------------------

    def schedule(self) -> list[ScheduledSequence]:
        """Admit waiting sequences and return the work of the next step.

        It is empty only if no request is unfinished, or if all running sequences end with their in-flight tokens."""
        if self._waiting:
            self._admit()
        self._step += 1
        work = self._plan()
        if num_forks := sum([len(w.forks) for w in work]):
            self.cache.free_slots(num_forks)
        return work

    def _plan(self) -> list[ScheduledSequence]:
        """Return the work of the running sequences, after freeing the blocks for it."""
        decoding: list[tuple[Sequence, int]] = []
        prefills: list[tuple[Sequence, int]] = []
        for s in self._running:
            uncached = s.num_uncached
            if uncached and not s.awaits_fork and not s.ends_in_flight:
                (prefills if uncached > 1 else decoding).append((s, uncached))
        prefills.sort(key=lambda item: item[0].last_sampled_step)
        budget = self._budget(decoding)
        limit = min(budget.num_prefill, sum([uncached for _, uncached in prefills]))
        # A block and a copy for each sequence that decodes; one more for each prefill.
        fits = limit + len(prefills) + 2 * len(decoding) <= self._engine.num_free_blocks
        planned: dict[Sequence, ScheduledSequence] = {}
        num_blocks = 0
        for s, uncached in decoding + prefills:
            count = budget.fit(s, uncached)
            if not count or s.handle is None:  # without a handle: preempted for another one
                continue
            if not fits:
                if not self._free_blocks_for(s, count, num_blocks, planned):
                    continue
                num_blocks += self.cache.blocks_needed(s, count)
            budget.take(s, count, uncached)
            planned[s] = self._work(s, count, count == uncached)
        return list(planned.values())

    def _budget(self, decoding: Seq[tuple[Sequence, int]]) -> StepBudget:
        """Return what a step may process beside the sequences that decode."""
        limit = self.config.max_num_batched_tokens
        num_prefill = max(limit - len(decoding), limit // 4, 1)
        if any(s.request.queue is not None for s, _ in decoding):
            num_prefill = self.prefill_limit.apply(num_prefill)
        return StepBudget(num_prefill)

    def _free_blocks_for(self, s: Sequence, count: int, reserved: int, planned: Collection[Sequence]) -> bool:
        """Close idle sequences and preempt later ones until `count` tokens fit; return whether they do."""
        while not self.cache.free_blocks(s, count, reserved):
            if not self._preempt_last(s, same_priority=True, planned=planned) and not self._preempt_beam(s, planned):
                return False
        return True

    def _work(self, s: Sequence, count: int, samples: bool) -> ScheduledSequence:
        """Return the work that processes `count` tokens of a sequence, and count them as cached."""
        if s.slides and s.next_start != s.start:
            self.cache.slide(s)
        request, first = s.request, s.start + s.num_cached
        s.num_cached += count
        token_ids, num_scored = s.token_ids[first : first + count], 0
        forks: tuple[Sequence, ...] = ()
        if request.prompt_reads is not None:
            num_scored, samples = request.prompt_reads.num_read(s.num_cached), samples and not request.prompt_only
        if samples or num_scored:
            s.last_sampled_step = self._step
        if samples and len(request.sequences) > 1:
            forks = tuple([fork for fork in request.sequences if fork.awaits_fork and fork.finish_reason is None])
            for fork in forks:
                fork.start, fork.num_cached, fork.last_sampled_step = s.start, s.num_cached, self._step
        return ScheduledSequence(s, token_ids, samples, forks, len(token_ids) < count, num_scored)

    def postprocess(self, work: Seq[ScheduledSequence], tokens: Seq[Seq[int]]) -> list[Sequence]:
        """Append the sampled tokens to their sequences and return the sequences that have finished.

        Args:
            work: from `schedule`.
            tokens: sampled tokens of each sequence in `sampling_sequences(work)`: one in plain decoding; several after
                speculation, of which all but the last are cached; none for a sequence that failed or finished.
                Tokens after the end of an output are discarded.
        """
        for s, sampled in zip(sampling_sequences(work), tokens, strict=True):
            if s.request.beams is not None:
                continue  # core/beam_search.py has appended its token
            if s.num_inflight_tokens:
                s.num_inflight_tokens -= 1
            s.num_cached += len(sampled) - 1
            try:
                for token in sampled:
                    if s.finish_reason is None:
                        s.append(token)
            except NanoinferError as e:  # the tokenizer cannot decode the token
                s.abort(str(e))
        for w in work:
            if w.num_scored:
                w.sequence.finish_if_scored()
        return self.remove_finished()

    # Beams -----------------------------------------------------------------------------------------------
    #
    # The beams of a search (core/beam_search.py) need not run in the same step, but the search continues only when the
    # logits of all are read. So a beam that was preempted may take the slot of a request of its own priority: the
    # other beams wait for it and hold memory. A beam whose logits were read does nothing until then, and may be
    # preempted for another one of its search.

    def _preempt_beam(self, winner: Sequence, planned: Collection[Sequence] = ()) -> bool:
        """Preempt a beam without work of the search of `winner` that is not planned; return whether there was one."""
        for s in self._running:
            if s.request is winner.request and s.handle is not None and not s.num_uncached and s not in planned:
                self._preempt(s)
                return True
        return False

    def requeue(self, request: Request) -> None:
        """Let the beams of the next step wait that have no sequence in the engine."""
        for s in request.sequences:
            s.awaits_beams = False
        for s in [s for s in self._running if s.request is request and s.handle is None and s.finish_reason is None]:
            insort(self._waiting, s, key=_rank)
            self._running.remove(s)

    # Ends ------------------------------------------------------------------------------------------------

    def remove_finished(self) -> list[Sequence]:
        """Remove finished sequences from the running ones, leave them to the prefix cache, and return them."""
        ended = [s for s in self._running if s.finish_reason is not None]
        if not ended:
            return ended
        for s in ended:
            if s.handle is not None:
                self.cache.retire(s)
        self._running = [s for s in self._running if s.finish_reason is None]
        if any(s.request.beams for s in ended):  # a beam that waits ends with the others
            self._waiting = [s for s in self._waiting if s.finish_reason is None]
        return ended

    def abort(self, request: Request, error: str | None = None) -> list[Sequence]:
        """End a request, waiting or running; return the sequences that are no longer running."""
        for sequence in request.sequences:
            sequence.abort(error)
        self._waiting = [s for s in self._waiting if s.request is not request]
        return self.remove_finished()

    def abort_running(self, error: str | None = None) -> list[Sequence]:
        """End all admitted requests, also after an exception in the middle of a call; return their sequences.

        The engine must be reset: no sequence stays open.
        """
        self.cache.clear()
        ended = [*self._running, *(s for s in self._waiting if s.admitted)]
        for sequence in ended:
            sequence.abort(error)
        for sequence in [*ended, *self._waiting]:  # one may have been interrupted while it was admitted
            sequence.handle, sequence.num_cached = None, 0
        self._waiting = [s for s in self._waiting if s.finish_reason is None]
        self._running, self._preempted = [], []
        return ended


def _rank(s: Sequence) -> tuple[int, bool, int, int]:
    """Return a sequence's rank in the order of admission: by priority, then preempted ones first, then by arrival."""
    return s.request.priority, not s.admitted, s.request.request_id, s.sample_index


def _may_preempt_equals(s: Sequence) -> bool:
    """Return whether sequences of the same priority may be preempted for a waiting one: for beams."""
    return s.admitted and s.request.beams is not None
