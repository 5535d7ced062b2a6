"""An unpickler that executes no code: it builds containers, strings and numbers, and calls only functions it is given.

It derives from the pure-Python unpickler, because the C unpickler sizes its memo table by a number in the file. These
limits prevent a small file from taking long or crashing the process:

- the number of opcodes and of bytes is limited;
- keys are strings, bytes or integers: hashing a tuple recurses, and tuples with colliding hashes are easy to construct;
- integers have at most 64 bits: Python hashes integers modulo 2**61 - 1, so larger integers can be made to collide;
- no opcode that allocates a size given in the file (bytearrays) is allowed, and only `globals` are called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

MAX_OPCODES = 250_000  # GPT-2 XL's checkpoint with its optimizer has 80,000; a vocabulary of 40,000 characters 200,000
_OPCODES = (
    "PROTO FRAME STOP MARK MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET NONE NEWTRUE NEWFALSE "
    "INT LONG LONG1 BININT BININT1 BININT2 UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8 "
    "EMPTY_DICT DICT SETITEM SETITEMS EMPTY_LIST LIST APPEND APPENDS GLOBAL STACK_GLOBAL".split()
)
_OF_TENSORS = "FLOAT BINFLOAT EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 REDUCE BUILD BINPERSID".split()


class _Counted(dict[int, Callable[[Any], None]]):
    """Dispatch table of the allowed opcodes, which counts the opcodes left."""

    left = MAX_OPCODES

    def __getitem__(self, opcode: int) -> Callable[[Any], None]:
        self.left -= 1
        if self.left < 0:
            raise pickle.UnpicklingError(f"it has more than {MAX_OPCODES} opcodes")
        return super().__getitem__(opcode)

    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"it contains another type of object (opcode {opcode:#04x})")


class PlainUnpickler(pickle._Unpickler):
    """Allows dicts, lists, strings and integers; with `globals`, also tuples, floats and calls of the globals.

    Args:
        raw: the pickle.
        globals: full name -> its replacement, which is called with arguments from the pickle. Tensors are built by
            these functions and by `persistent_load`, which a subclass may override.
        opcodes: names of further opcodes that are allowed.
    """

    def __init__(self, raw: bytes, globals: dict[str, Any] | None = None, opcodes: str = "") -> None:
        super().__init__(io.BytesIO(raw))
        self._globals = globals or {}
        names = (_OPCODES if globals is None else _OPCODES + _OF_TENSORS) + opcodes.split()
        table = _Counted((op, pickle._Unpickler.dispatch[op]) for op in (getattr(pickle, n)[0] for n in names))
        for opcode, check in _CHECKED.items():
            if opcode in table:
                table[opcode] = check
        self.dispatch = table  # type: ignore[misc]  # one table per pickle, because it counts

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a global; the methods of pickle call this."""
        if (full := f"{module}.{name}") not in self._globals:
            raise pickle.UnpicklingError(f"it refers to {full}, which is not allowed")
        return self._globals[full]

    def persistent_load(self, pid: Any) -> Any:
        """Raise an error: a plain pickle has no references to external objects."""
        raise pickle.UnpicklingError("it refers to a persistent object, which is not allowed")

    def build(self, target: Any, state: Any) -> None:
        """Ignore the state of an object: attributes of an OrderedDict, such as the versions of a state dict."""


def _integer(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def checked(unpickler: Any) -> None:
        load(unpickler)
        if unpickler.stack[-1].bit_length() > 64:
            raise pickle.UnpicklingError("it contains an integer of more than 64 bits")

    return checked


def _set_items(unpickler: Any, items: list[Any]) -> None:
    target = unpickler.stack[-1]
    if type(target) is not dict:
        raise pickle.UnpicklingError(f"it sets items of a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, (str, int, bytes)):
            raise pickle.UnpicklingError(f"it has a key that is a {type(key).__name__}, not a string or an integer")
        target[key] = value


def _set_item(unpickler: Any) -> None:
    value, key = unpickler.stack.pop(), unpickler.stack.pop()
    _set_items(unpickler, [key, value])


def _dict(unpickler: Any) -> None:
    items = unpickler.pop_mark()
    unpickler.append({})
    _set_items(unpickler, items)


def _build(unpickler: Any) -> None:
    state = unpickler.stack.pop()
    unpickler.build(unpickler.stack[-1], state)


_load = pickle._Unpickler.dispatch
_CHECKED: dict[int, Callable[[Any], None]] = {
    pickle.SETITEM[0]: _set_item,
    pickle.SETITEMS[0]: lambda unpickler: _set_items(unpickler, unpickler.pop_mark()),
    pickle.DICT[0]: _dict,
    pickle.BUILD[0]: _build,
    **{op[0]: _integer(_load[op[0]]) for op in (pickle.INT, pickle.LONG, pickle.LONG1)},
}
