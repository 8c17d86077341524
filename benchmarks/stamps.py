"""When a process began and ended each batch of messages, in a file that can be read at any time and costs nothing."""

from __future__ import annotations

import mmap
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

BATCHES = 64
_ROW = struct.Struct("=ddq")


class Stamp(NamedTuple):
    """One batch: when its first message began and its last one ended, and how many there were."""

    first_at: float
    last_at: float
    messages: int


class Stamps:
    """The stamps of this process, once its file is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: mmap.mmap | bytearray = bytearray(BATCHES * _ROW.size)

    def open(self, path: Path) -> None:
        """Keep the stamps in a new file."""
        path.write_bytes(bytes(BATCHES * _ROW.size))
        with path.open("r+b") as file:
            self._rows = mmap.mmap(file.fileno(), 0)

    def note(self, batch: int, began_at: float, ended_at: float) -> None:
        """Count one message of a batch."""
        with self._lock:
            first_at, last_at, count = _ROW.unpack_from(self._rows, batch * _ROW.size)
            row = (min(first_at or began_at, began_at), max(last_at, ended_at), count + 1)
            _ROW.pack_into(self._rows, batch * _ROW.size, *row)


def read(paths: Iterable[Path], batch: int) -> Stamp:
    """One batch over all processes."""
    rows = [Stamp(*_ROW.unpack_from(path.read_bytes(), batch * _ROW.size)) for path in paths]
    begun = [row for row in rows if row.messages]
    if not begun:
        return Stamp(0.0, 0.0, 0)
    return Stamp(min(r.first_at for r in begun), max(r.last_at for r in begun), sum(r.messages for r in begun))
