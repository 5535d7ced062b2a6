"""The adapters of a core: which are loaded, and which requests have them.

An adapter is read when a request names it first, loaded when that is queued, and stays loaded until another one needs
its place. Those of unfinished requests are kept; of the others, the one that was not used for the longest time is
unloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from nanoinfer.checkpoints.adapters import Adapter, read_adapter
from nanoinfer.config import EngineConfig, ModelConfig
from nanoinfer.errors import NanoinferError, show
from nanoinfer.sampling_params import LoRARequest
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer.scheduling.sequence import Request


@dataclass(frozen=True)
class _Loaded:
    path: str
    adapter: Adapter
    number: int
    """The engine's."""

    def of(self, lora: LoRARequest) -> _Loaded:
        """Return this adapter. Raises NanoinferError if it is another one than `lora`, whose number is the same."""
        if self.path != lora.lora_path:
            raise NanoinferError(
                f"lora_int_id={lora.lora_int_id} of {lora.lora_path!r} is that of {self.path!r}: give each adapter a"
                " number of its own"
            )
        return self


class Adapters:
    """Reads adapters and loads them into an engine.

    Args:
        scheduler: of the requests, and with the engine.
        model: config of the base.
        options: enable_lora, max_loras and max_lora_rank are used.
    """

    def __init__(self, scheduler: Scheduler, model: ModelConfig, options: EngineConfig) -> None:
        self._cache, self._scheduler = scheduler.cache, scheduler
        self._model, self._options = model, options
        self._loaded: dict[int, _Loaded] = {}  # by lora_int_id, least recently used first
        self._wanted: WeakKeyDictionary[Request, tuple[LoRARequest, Adapter]] = WeakKeyDictionary()

    def assign(self, lora: LoRARequest, request: Request) -> None:
        """Set the adapter of a request that is not queued yet. Any thread may call it. Raises as `read`."""
        self._wanted[request] = lora, self.read(lora)

    def read(self, lora: LoRARequest) -> Adapter:
        """Return an adapter.

        Raises:
            NanoinferError: enable_lora is off, or the adapter is malformed or of another base (`read_adapter`).
        """
        if not isinstance(lora, LoRARequest):
            raise NanoinferError(f"lora_request={show(lora)} is not a LoRARequest")
        if not self._options.enable_lora:
            raise NanoinferError(f"lora_request={lora.lora_name!r}: the model was loaded without enable_lora=True")
        loaded = self._loaded.get(lora.lora_int_id)
        if loaded is None:
            return read_adapter(lora.lora_path, self._model, self._options.max_lora_rank)
        return loaded.of(lora).adapter

    def load(self, requests: Sequence[Request]) -> None:
        """Load the adapters of requests that are about to be queued. The caller has the core's lock.

        Raises:
            NanoinferError: max_loras adapters have unfinished requests, or two requests have different adapters of the
                same number.
        """
        used = self._scheduler.adapters
        for request in requests:
            if (wanted := self._wanted.pop(request, None)) is not None:
                lora, adapter = wanted
                if (loaded := self._loaded.get(lora.lora_int_id)) is None:
                    self._make_place(used)
                    loaded = _Loaded(lora.lora_path, adapter, self._cache.engine.load_adapter(adapter))
                loaded = loaded.of(lora)
                self._loaded.pop(lora.lora_int_id, None)
                self._loaded[lora.lora_int_id] = loaded  # used last
                request.adapter = loaded.number
                used.add(loaded.number)

    def _make_place(self, used: set[int]) -> None:
        """Unload adapters that are not in use until another one can be loaded."""
        while len(self._loaded) >= self._options.max_loras:
            key = next((key for key, loaded in self._loaded.items() if loaded.number not in used), None)
            if key is None:
                raise NanoinferError(
                    f"max_loras={self._options.max_loras} adapters have unfinished requests: raise it, or retry later"
                )
            number = self._loaded.pop(key).number
            self._cache.close_adapter(number)
            self._cache.engine.unload_adapter(number)
