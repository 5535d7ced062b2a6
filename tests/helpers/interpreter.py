"""Triton's interpreter without repeated work, which is more than half of its time.

For each kernel that is launched, and again for each function that a kernel calls, it goes through several hundred names
of the language to make them its own (triton/runtime/interpreter.py, `InterpretedFunction.__call__`); the second time
changes nothing. For each operation, it makes a table of all data types to look one up (`_get_np_dtype`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

NOTHING_TO_RESTORE = SimpleNamespace(restore=lambda: None)


def leave_out_repeated_work() -> None:
    """Do each of these once. Without triton, or with a version that has other names, this does nothing."""
    try:
        from triton import language
        from triton.runtime import interpreter as module
    except ImportError:
        return
    interpreter: Any = module
    core: Any = language.core
    if not hasattr(interpreter, "_get_np_dtype") or not hasattr(interpreter, "_patch_lang"):
        return
    numpy_type, patch, found = interpreter._get_np_dtype, interpreter._patch_lang, dict[str, Any]()

    def numpy_type_once(type: Any) -> Any:
        if type.name not in found:  # types of pointers and blocks have no hash
            found[type.name] = numpy_type(type)
        return found[type.name]

    def is_patched(names: Any) -> bool:
        return not core.is_builtin(names.load) and not core.is_builtin(names.tensor.to)

    def patch_the_rest(function: Any) -> Any:
        used = [value for value in function.__globals__.values() if value is language or value is core]
        return NOTHING_TO_RESTORE if used and all(map(is_patched, used)) else patch(function)

    interpreter._get_np_dtype, interpreter._patch_lang = numpy_type_once, patch_the_rest
