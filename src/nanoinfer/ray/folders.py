"""Folders of this machine and of object stores: one file system of pyarrow and a path in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from nanoinfer.errors import NanoinferError, missing_extra
from nanoinfer.utils.files import escaped, reason

if TYPE_CHECKING:
    from pyarrow import fs


def is_uri(name: str) -> bool:
    """Return whether a name is a URI."""
    return "://" in name


@dataclass(frozen=True)
class Folder:
    """A folder, which may not exist yet, or a file, as a folder that has nothing else."""

    name: str
    """Its path or URI, as it was given."""
    system: fs.FileSystem
    path: str
    is_file: bool

    @classmethod
    def of(cls, name: str) -> Folder:
        """Return the folder of a path or a URI. Raises NanoinferError: pyarrow does not know such URIs."""
        try:
            from pyarrow import fs
        except ImportError:
            raise NanoinferError(missing_extra("pyarrow", "cluster")) from None
        with cannot(name, "be opened"):
            system, path = (
                fs.FileSystem.from_uri(name) if is_uri(name) else (fs.LocalFileSystem(), os.path.abspath(name))
            )
            return cls(name, system, path, system.get_file_info(path).is_file)

    def at(self, name: str) -> str:
        """Return the path of a file in it."""
        return self.path if self.is_file else f"{self.path.rstrip('/')}/{name}"

    def open(self, path: str) -> BinaryIO:
        """Open one of its files for reading. Raises OSError."""
        try:
            return cast(BinaryIO, self.system.open_input_file(path))
        except ValueError as e:  # of pyarrow
            raise OSError(str(e)) from None

    def sizes(self) -> dict[str, int]:
        """Return the sizes of its files by name, sorted. Raises NanoinferError."""
        from pyarrow import fs

        with cannot(self.name, "be read"):
            what = [self.path] if self.is_file else fs.FileSelector(self.path)
            found = self.system.get_file_info(what)
            return {f.base_name: f.size for f in sorted(found, key=lambda f: str(f.base_name)) if f.is_file}

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of a small file; None if it does not exist. Raises NanoinferError."""
        path = self.at(name)
        with cannot(path, "be read"), suppress(FileNotFoundError), self.system.open_input_file(path) as file:
            return bytes(file.read(limit))
        return None

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """Open a file that appears when the block has ended without an exception. Raises NanoinferError."""
        part = self.at(f".{name}.part")
        try:
            with cannot(self.at(name), "be written"):
                stream = self.system.open_output_stream(part)
            with stream:
                yield stream
            with cannot(self.at(name), "be written"):
                self.system.move(part, self.at(name))
        except BaseException:
            with suppress(OSError):
                self.system.delete_file(part)
            raise


@contextmanager
def cannot(name: str, what: str) -> Iterator[None]:
    """Turn errors of files into one of a line: "NAME cannot be written: Permission denied"."""
    try:
        yield
    except NanoinferError:
        raise
    except (OSError, ValueError) as e:  # ValueError: of pyarrow
        raise NanoinferError(f"{escaped(name)} cannot {what}: {reason(e)}") from None
