"""Read PyTorch's file format (torch.save), and other pickles, without executing code.

A file of torch.save is a ZIP archive of one pickle and one record of bytes per storage. torch.load is not used: it
parses the archive's tables independently of our checks, and its safe unpickler does not limit time or the nesting of
keys. Here `zipfile` reads only the table of contents, `PlainUnpickler` reads the pickle, and tensors are references to
the file (`StoredTensor`), which are read one at a time.

`PlainUnpickler` builds containers, strings and numbers, and calls only functions it is given. It derives from the
pure-Python unpickler, because the C unpickler sizes its memo table by a number in the file. These limits prevent a
small file from taking long or crashing the process:

- the number of opcodes and of bytes is limited;
- keys are strings, bytes or integers: hashing a tuple recurses, and tuples with colliding hashes are easy to construct;
- integers have at most 64 bits: Python hashes integers modulo 2**61 - 1, so larger integers can be made to collide;
- no opcode that allocates a size given in the file (bytearrays) is allowed, and only `globals` are called.

Covered: files of torch.save since PyTorch 1.6 with uncompressed records, strided tensors, parameters and ordered dicts.
Not covered: the older format, compressed records, sparse and quantized tensors.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nanoinfer.errors import NanoinferError
from nanoinfer.models.stored import StoredTensor, span
from nanoinfer.utils.arrays import ITEM_BYTES
from nanoinfer.utils.files import RegularFile, escaped, reason

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


MAX_PICKLE_BYTES = 8 << 20  # of the pickle, which contains no tensor data; GPT-2's has 0.1 MB
MAX_CONTENTS_BYTES = 2 << 20  # of the archive's table of contents; GPT-2 XL with its optimizer has 0.3 MB
_LOCAL_HEADER_BYTES = 30


class _Type(NamedTuple):
    """Type of the values of a storage."""

    dtype: str
    item_bytes: int


class _Storage(NamedTuple):
    file: RegularFile
    start: int
    num_items: int
    type: _Type


_STORAGES = {
    "Float": _Type("float32", 4), "BFloat16": _Type("bfloat16", 2), "Half": _Type("float16", 2),
    "Double": _Type("float64", 8), "Long": _Type("int64", 8), "Int": _Type("int32", 4), "Short": _Type("int16", 2),
    "Char": _Type("int8", 1), "Byte": _Type("uint8", 1), "Bool": _Type("bool", 1),
}  # fmt: skip


class _Contents(io.FileIO):
    """File object from which `zipfile` reads the table of contents; the size of a read is limited."""

    def __init__(self, file: RegularFile) -> None:
        super().__init__(os.dup(file.fileno()))
        self.size = file.size

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes; all that are left without a size."""
        left = max(0, self.size - self.tell())
        size = left if size is None or size < 0 else min(size, left)
        if size > MAX_CONTENTS_BYTES:
            raise zipfile.BadZipFile(f"a table of contents of {size} bytes; the limit is {MAX_CONTENTS_BYTES}")
        return super().read(size)


class _Archive:
    """The records of an archive: their offsets and sizes."""

    def __init__(self, file: RegularFile) -> None:
        self._file = file
        with _Contents(file) as contents, zipfile.ZipFile(contents) as archive:
            entries = archive.infolist()
        roots = [name.removesuffix("data.pkl") for e in entries if (name := e.filename).endswith("/data.pkl")]
        if len(roots) != 1:
            raise ValueError(f"it has {len(roots)} records named data.pkl")
        self.root = roots[0]
        self._entries = {e.filename: e for e in entries}
        if len({name.lower() for name in self._entries}) < len(entries):
            raise ValueError("two of its records have the same name")

    def __contains__(self, name: str) -> bool:
        return self.root + name in self._entries

    def place(self, name: str) -> tuple[int, int]:
        """Return the offset and the size of a record, in bytes."""
        entry = self._entries.get(self.root + name)
        if entry is None:
            raise ValueError(f"it has no record {name[:80]!r}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"its record {name[:80]!r} is compressed or encrypted: save it again with torch.save")
        local = self._file.read(entry.header_offset, _LOCAL_HEADER_BYTES)
        if local[:4] != b"PK\x03\x04":
            raise ValueError(f"its record {name[:80]!r} is not at the offset in its table of contents")
        start = entry.header_offset + _LOCAL_HEADER_BYTES
        start += int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
        if start + entry.file_size > self._file.size:
            raise ValueError(f"its record {name[:80]!r} extends past the end of the file")
        return start, entry.file_size

    def read(self, name: str, limit: int) -> bytes:
        start, size = self.place(name)
        if size > limit:
            raise ValueError(f"its {name} has {size} bytes; the limit is {limit}")
        return self._file.read(start, size)


class _TensorUnpickler(PlainUnpickler):
    """Unpickles a data.pkl: containers, and tensors as references to the file."""

    def __init__(self, file: RegularFile, archive: _Archive) -> None:
        super().__init__(archive.read("data.pkl", MAX_PICKLE_BYTES), _KNOWN)
        self._file, self._archive = file, archive

    def persistent_load(self, pid: Any) -> _Storage:
        kind, type, key, _, num_items = pid
        if kind != "storage" or not isinstance(type, _Type) or not isinstance(key, str):
            raise ValueError("it contains a storage in a form that torch.save does not write")
        start, num_bytes = self._archive.place(f"data/{key}")
        if not isinstance(num_items, int) or num_items < 0 or num_items * type.item_bytes > num_bytes:
            raise ValueError(f"its record data/{key[:80]} has {num_bytes} bytes, fewer than the pickle declares")
        return _Storage(self._file, start, num_items, type)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
    """Replace torch._utils._rebuild_tensor_v2; the arguments after the strides are for training."""
    numbers = [offset, *shape, *strides]
    if not isinstance(storage, _Storage) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError("it contains a tensor in a form that torch.save does not write")
    if len(shape) != len(strides) or len(shape) > 8 or offset + span(shape, strides) > storage.num_items:
        raise ValueError("it contains a tensor that extends past the end of its storage")
    start = storage.start + offset * storage.type.item_bytes
    return StoredTensor(storage.file, start, storage.type.dtype, tuple(shape), tuple(strides))


_KNOWN: dict[str, Any] = {
    **{f"torch.{name}Storage": type for name, type in _STORAGES.items()},
    **{f"torch.{type.dtype}": type.dtype for type in _STORAGES.values()},
    "collections.OrderedDict": lambda: {},
    "torch.Size": tuple,
    "torch.device": lambda *_: None,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
}


def read_archive(path: Path) -> tuple[Any, int]:
    """Return the object that torch.save wrote, with `StoredTensor` for tensors, and the file's size in bytes.

    Raises:
        NanoinferError: the file is malformed, or contains anything but tensors and plain data.
    """
    file = RegularFile(path, "a checkpoint")
    try:
        if (first := file.read(0, min(4, file.size))) != b"PK\x03\x04":
            if first[:1] == b"\x80":  # of a pickle
                raise ValueError("PyTorch before 1.6 wrote it: load it with torch.load and save it again")
            raise ValueError("it is neither GGUF nor a ZIP archive that torch.save wrote")
        archive = _Archive(file)
        if "byteorder" in archive and archive.read("byteorder", 16) != b"little":
            raise ValueError("its values are big-endian")
        return _TensorUnpickler(file, archive).load(), file.size
    except NanoinferError:
        raise
    except Exception as e:  # a hostile archive or pickle can raise any exception
        raise NanoinferError(
            f"{escaped(path)} cannot be read as a checkpoint of tensors and plain data: {reason(e)}"
        ) from None


def check_state(state: Any, num_bytes: int, what: str) -> None:
    """Check that an object is a state dict, and that its tensors need no more memory than the file's size.

    Strides of 0 and tensors that share bytes would need more. Only a tied head may share its bytes.

    Args:
        state: the object.
        num_bytes: size of the file.
        what: beginning of the error message.

    Raises:
        NanoinferError: a check failed.
    """
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, StoredTensor) for name, tensor in state.items()
    ):
        raise NanoinferError(f"{what} is not a dict of names to dense tensors")
    claimed = sum(t.num_bytes for name, t in state.items() if name != "lm_head.weight" and t.dtype in ITEM_BYTES)
    if claimed > num_bytes:
        raise NanoinferError(f"{what}: its tensors need {claimed} bytes, but the file has only {num_bytes}")
