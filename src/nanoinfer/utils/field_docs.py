"""The documentation of dataclass fields: the string under each, for the help of flags and the OpenAPI document."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from itertools import pairwise


def field_docs(cls: type) -> dict[str, str]:
    """Return the string under each field of a dataclass: {"max_tokens": "Most tokens to generate."}."""
    body = _classes(cls.__module__)[cls.__name__].body
    docs = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the syntax of a module's classes by name; faster than inspect.getsource(cls), which tokenizes each."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}
