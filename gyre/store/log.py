"""An append-only log of frames: magic, length, CRC-32, payload. What was written whole is read back, always.

A killed process leaves at most one torn frame, at the end: opening the log for writing cuts it off. Damage
before the end is an error that names the offset, and nothing is cut then. A write that fails (full disk) leaves
the log as it was before. `sync` makes what was written survive a lost node.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gyre.errors import StoreError

FRAME = struct.Struct("<4sII")
MAGIC = b"gyr1"
READ_BYTES = 1 << 20


class LogWriter:
    """The one writer of a log file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut_bytes = _cut_torn_tail(path) if path.exists() else 0
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise StoreError(f"cannot open {path} for writing: {error}") from error
        self.size = os.fstat(self._fd).st_size
        self._is_synced = True

    def append(self, payload: bytes) -> int:
        """Write one frame; returns its offset. Raises StoreError (full disk), and nothing was written then."""
        offset = self.size
        frame = memoryview(FRAME.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload)
        self._is_synced = False
        try:
            while frame:
                # A full disk first takes a part and refuses the rest.
                frame = frame[os.write(self._fd, frame) :]
        except OSError as error:
            os.ftruncate(self._fd, offset)
            raise _unwritable(self.path, error) from error
        self.size += FRAME.size + len(payload)
        return offset

    def sync(self) -> None:
        """Make everything written so far survive a power cut. Raises StoreError (full or failing disk)."""
        if self._is_synced:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._is_synced = True

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, payload) of each whole frame. A torn tail ends the reading; damage before it is a StoreError."""
    try:
        file = path.open("rb", buffering=READ_BYTES)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        offset = 0
        while offset < size:
            payload = _read_one(file)
            if payload is None:
                _check_torn(file, path, offset)
                return
            yield offset, payload
            offset += FRAME.size + len(payload)


def read_frame(path: Path, offset: int) -> bytes:
    """The payload of the frame at `offset`. Raises StoreError if there is no whole frame."""
    with path.open("rb") as file:
        file.seek(offset)
        payload = _read_one(file)
    if payload is None:
        raise StoreError(f"{path} has no whole frame at byte {offset}")
    return payload


def _read_one(file: BinaryIO) -> bytes | None:
    """The payload at the file's position; None if no whole frame lies there."""
    head = file.read(FRAME.size)
    if len(head) < FRAME.size:
        return None
    magic, length, crc = FRAME.unpack(head)
    if magic != MAGIC or length > os.fstat(file.fileno()).st_size - file.tell():
        return None
    payload = file.read(length)
    return payload if len(payload) == length and zlib.crc32(payload) == crc else None


def _check_torn(file: BinaryIO, path: Path, offset: int) -> None:
    """What lies at `offset` is no frame: a torn tail if no whole frame follows it, else damage."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(MAGIC, offset + 1)
        while at >= 0:
            file.seek(at)
            if _read_one(file) is not None:
                raise StoreError(
                    f"{path} is damaged at byte {offset}: no whole frame there, yet the next is at byte {at};"
                    f" restore the file from a copy, or lose what follows: truncate -s {offset} {path}"
                )
            at = data.find(MAGIC, at + 1)


def _cut_torn_tail(path: Path) -> int:
    """Cut what follows the last whole frame; returns the number of bytes cut."""
    end = 0
    for offset, payload in read_frames(path):
        end = offset + FRAME.size + len(payload)
    torn = path.stat().st_size - end
    if torn:
        os.truncate(path, end)
    return torn


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot write {path}: {error}; free some space in {path.parent} and go on with --resume")
