"""Read files of torch.save by PyTorch, without executing code; and plain pickles without any class or function."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nanoinfer.errors import NanoinferError, escaped, missing_extra, reason
from nanoinfer.models.stored import StoredTensor
from nanoinfer.utils.files import RegularFile

if TYPE_CHECKING:
    import torch


class PlainUnpickler(pickle._Unpickler):
    """Unpickles containers, strings and numbers, and the classes in `classes`; it calls nothing else.

    The C unpickler sizes its memo table by a number in the file; this one, in Python, does not.

    Args:
        raw: the pickle.
        classes: full name -> the class that stands for it.
    """

    def __init__(self, raw: bytes, classes: dict[str, type] | None = None) -> None:
        super().__init__(io.BytesIO(raw))
        self._classes = classes or {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the class that stands for a global; the methods of pickle call this."""
        if (full := f"{module}.{name}") not in self._classes:
            raise pickle.UnpicklingError(f"it refers to {full}, which is not allowed")
        return self._classes[full]


class _Storage(RegularFile):
    """A storage that PyTorch has mapped, as a file: offsets are those in the storage."""

    def __init__(self, file: RegularFile, storage: torch.UntypedStorage) -> None:
        import torch

        self.path, self.size, self._fd = file.path, file.size, -1
        self._content: NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from offset `start`."""
        buffer[:] = self._content[start : start + len(buffer)].data


def read_checkpoint(path: Path) -> Any:
    """Return the object that torch.save wrote. Its tensors are mapped: the file must not be truncated before they go.

    Raises:
        NanoinferError: PyTorch is not installed, or the file contains anything but tensors and plain data.
    """
    RegularFile(path, "a checkpoint")
    broken = f"{escaped(path)} cannot be read as a checkpoint of tensors and plain data"
    if not zipfile.is_zipfile(path):
        raise NanoinferError(
            f"{broken}: it is neither GGUF nor a ZIP archive that torch.save wrote: download it again, or save it"
            " again with PyTorch 1.6 or later"
        )
    try:
        import torch
    except ImportError:
        raise NanoinferError(
            f"{escaped(path)} is read by PyTorch: {missing_extra('torch', 'torch')}; or pack the model with"
            " `nanoinfer pack` on a machine that has PyTorch, and give that folder"
        ) from None
    try:
        with zipfile.ZipFile(path) as archive:  # PyTorch maps compressed records as they are
            mappable = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    except Exception as e:  # a hostile archive or pickle can raise any exception
        why = str(e).rpartition("trusted source.")[2].strip().partition("\n")[0]  # without PyTorch's advice
        raise NanoinferError(f"{broken}: {escaped(why) or reason(e)}") from None


def stored_tensors(state: Any, path: Path, what: str = "") -> dict[str, StoredTensor]:
    """Return the tensors of a state dict that `read_checkpoint` returned.

    Args:
        state: the state dict, which is checked.
        path: the file.
        what: the part of the file, for error messages.

    Raises:
        NanoinferError: it is no state dict of dense tensors, or they need more memory than the file's size: strides of
            0 and tensors that share bytes would. Only a tied head may share its bytes.
    """
    import torch

    file, where = RegularFile(path, "a checkpoint"), f"{escaped(path)}{what}"
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(t, torch.Tensor) and t.layout == torch.strided and t.device.type == "cpu"
        for name, t in state.items()
    ):
        raise NanoinferError(f"{where} is not a dict of names to dense tensors")
    if (claimed := sum(t.nbytes for name, t in state.items() if name != "lm_head.weight")) > file.size:
        raise NanoinferError(f"{where}: its tensors need {claimed} bytes, but the file has only {file.size}")
    storages: dict[int, _Storage] = {}
    tensors = {}
    for name, t in state.items():
        storage = t.untyped_storage()
        own = storages.setdefault(storage.data_ptr(), _Storage(file, storage))
        start, dtype = t.storage_offset() * t.itemsize, str(t.dtype).removeprefix("torch.")
        tensors[name] = StoredTensor(own, start, dtype, tuple(t.shape), t.stride())
    return tensors
