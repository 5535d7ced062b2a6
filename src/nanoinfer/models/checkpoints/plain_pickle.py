"""An unpickler that executes nothing: containers, strings and numbers, and the few names that a reader admits.

It is the pure-Python one, on purpose: the C one sizes its memo table by a number in the file. Each way in which a
small file takes long or ends the process is closed:

- the number of opcodes and of bytes is limited;
- only strings and integers are keys: hashing a tuple recurses, and tuples can be chosen so that their hashes collide;
- integers have 64 bits: larger ones collide, since Python hashes them modulo 2**61 - 1;
- no opcode allocates by a number in the file (bytearrays), and only `globals` are called.
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
    """The opcodes that are admitted, and how many may still come."""

    left = MAX_OPCODES

    def __getitem__(self, opcode: int) -> Callable[[Any], None]:
        self.left -= 1
        if self.left < 0:
            raise pickle.UnpicklingError(f"it has more than {MAX_OPCODES} opcodes")
        return super().__getitem__(opcode)

    def __missing__(self, opcode: int) -> Callable[[Any], None]:
        raise pickle.UnpicklingError(f"it holds something else (opcode {opcode:#04x})")


class PlainUnpickler(pickle._Unpickler):
    """Admits dicts, lists, strings and integers; with `globals`, also tuples, floats and calls of these.

    Args:
        raw: the pickle.
        globals: full name -> what takes its place; it is called with what the pickle gives it. A tensor's state
            is built from these and from `persistent_load`, which a subclass may define.
    """

    def __init__(self, raw: bytes, globals: dict[str, Any] | None = None) -> None:
        super().__init__(io.BytesIO(raw))
        self._globals = globals or {}
        names = _OPCODES if globals is None else _OPCODES + _OF_TENSORS
        table = _Counted((op, pickle._Unpickler.dispatch[op]) for op in (getattr(pickle, n)[0] for n in names))
        for opcode, check in _CHECKED.items():
            if opcode in table:
                table[opcode] = check
        self.dispatch = table  # type: ignore[misc]  # of this pickle: it counts

    def find_class(self, module: str, name: str) -> Any:
        """Return what takes the place of a name, for pickle's own methods."""
        if (full := f"{module}.{name}") not in self._globals:
            raise pickle.UnpicklingError(f"it asks for {full}")
        return self._globals[full]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse: a plain pickle refers to nothing outside itself."""
        raise pickle.UnpicklingError("it asks for a persistent object")


def _integer(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def checked(unpickler: Any) -> None:
        load(unpickler)
        if unpickler.stack[-1].bit_length() > 64:
            raise pickle.UnpicklingError("it holds an integer of more than 64 bits")

    return checked


def _set_items(unpickler: Any, items: list[Any]) -> None:
    target = unpickler.stack[-1]
    if type(target) is not dict:
        raise pickle.UnpicklingError(f"it sets items of a {type(target).__name__}")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, (str, int)):
            raise pickle.UnpicklingError(f"it has a key that is a {type(key).__name__}, not a string or an integer")
        target[key] = value


def _set_item(unpickler: Any) -> None:
    value, key = unpickler.stack.pop(), unpickler.stack.pop()
    _set_items(unpickler, [key, value])


def _set_many(unpickler: Any) -> None:
    _set_items(unpickler, unpickler.pop_mark())


def _dict(unpickler: Any) -> None:
    items = unpickler.pop_mark()
    unpickler.append({})
    _set_items(unpickler, items)


def _build(unpickler: Any) -> None:
    """An OrderedDict's attributes (a state dict's versions): nothing here needs them."""
    unpickler.stack.pop()


_load = pickle._Unpickler.dispatch
_CHECKED: dict[int, Callable[[Any], None]] = {
    pickle.SETITEM[0]: _set_item,
    pickle.SETITEMS[0]: _set_many,
    pickle.DICT[0]: _dict,
    pickle.BUILD[0]: _build,
    **{op[0]: _integer(_load[op[0]]) for op in (pickle.INT, pickle.LONG, pickle.LONG1)},
}
