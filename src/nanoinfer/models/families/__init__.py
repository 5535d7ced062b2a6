"""The families of models, one file for each lineage, and the table of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from nanoinfer.models.families.base import Family

_FILES = ("llama", "gpt2", "mistral", "qwen", "gemma", "olmo", "granite", "deepseek", "hybrid", "mamba")


ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Families of drafts that attend to the keys of another model (`config.Backbone`), which FAMILIES does not list."""


class _Families(Mapping[str, Family]):
    """The constants of these files, which are imported one after the other until one has the family."""

    def _all(self) -> Iterator[Family]:
        for name in _FILES:
            yield from (f for f in vars(import_module(f"{__name__}.{name}")).values() if isinstance(f, Family))

    def __getitem__(self, model_type: str) -> Family:
        for family in self._all():
            if family.model_type == model_type:
                return family
        raise KeyError(model_type)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(f.model_type for f in self._all() if f.model_type not in ASSISTANTS))

    def __len__(self) -> int:
        return sum(1 for _ in self)


FAMILIES: Mapping[str, Family] = _Families()
"""By model_type."""
