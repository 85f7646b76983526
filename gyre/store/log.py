"""An append-only log of frames: magic, length, CRC-32, payload. What was written whole is read back, always.

A frame is written by one call, so a killed process leaves at most one torn frame, at the end: opening the log for
writing cuts it off. Damage before the end is an error that names the offset. `sync` makes what was written
survive a lost node.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from gyre.errors import StoreError

FRAME = struct.Struct("<4sII")
MAGIC = b"gyr1"
READ_BYTES = 1 << 20


class LogWriter:
    """The one writer of a log file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut_bytes = _cut_torn_tail(path) if path.exists() else 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._fd).st_size

    def append(self, payload: bytes) -> int:
        """Write one frame; returns its offset. Raises StoreError (full disk), and nothing was written then."""
        offset = self._size
        frame = FRAME.pack(MAGIC, len(payload), zlib.crc32(payload)) + payload
        try:
            written = os.write(self._fd, frame)
        except OSError as error:
            os.ftruncate(self._fd, offset)
            raise StoreError(f"cannot write {self.path}: {error}; free some disk space and resume") from error
        if written < len(frame):
            os.ftruncate(self._fd, offset)
            raise StoreError(f"cannot write {self.path}: the disk is full; free some space and resume")
        self._size += written
        return offset

    def sync(self) -> None:
        """Make everything written so far survive a power cut."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_frames(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, payload) of each whole frame. A torn tail ends the reading; damage before it is a StoreError."""
    size = path.stat().st_size
    with path.open("rb", buffering=READ_BYTES) as file:
        offset = 0
        while offset < size:
            head = file.read(FRAME.size)
            if len(head) < FRAME.size:
                return
            magic, length, crc = FRAME.unpack(head)
            if magic != MAGIC:
                raise StoreError(f"{path} is damaged at byte {offset}: no frame begins there")
            payload = file.read(length)
            end = offset + FRAME.size + length
            if len(payload) < length:
                return
            if zlib.crc32(payload) != crc:
                if end >= size:
                    return
                raise StoreError(f"{path} is damaged at byte {offset}: its checksum does not fit")
            yield offset, payload
            offset = end


def _cut_torn_tail(path: Path) -> int:
    """Cut what follows the last whole frame; returns the number of bytes cut."""
    end = 0
    for offset, payload in read_frames(path):
        end = offset + FRAME.size + len(payload)
    torn = path.stat().st_size - end
    if torn:
        os.truncate(path, end)
    return torn
