"""Transport between processes of one host: files in shared memory, written once, read through a mapping.

A region is one file, filled under another name and renamed, so that it is whole when it appears. Its first page
holds magic, generation, whether it is live, and the acknowledgements; a reader checks it before and after it
copies. The file's name carries the owner's process id and start time: whoever opens a transport removes the
files of owners that are dead, so a killed process leaks nothing for longer than the next start. Plain files are
used because Python's SharedMemory lets any process's resource tracker unlink what it only read.
"""

import fcntl
import itertools
import logging
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gyre.errors import TransportError
from gyre.fabric.transport import Range, Region
from gyre.owner import is_dead, stamp

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "gyre"
MAGIC = b"gyreshm1"
HEADER = struct.Struct("<8sQQQQ")  # magic, generation, size, is_live, acknowledgements
LIVE_AT, ACKNOWLEDGED_AT = 24, 32
DATA_AT = mmap.PAGESIZE
CHUNK_BYTES = 64 << 20
"""Between two chunks a pull looks at its deadline."""


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    name: str
    size: int
    generation: int


_generations = itertools.count(1)


class ShmTransport:
    """See `gyre.fabric.transport.Transport`. `run` (letters, digits, '-', '_') names the files for an operator."""

    def __init__(self, run: str, folder: Path = SHARED_MEMORY) -> None:
        self._folder = folder
        self._stem = f"{PREFIX}.{run.replace('.', '_')}.{stamp()}"
        self._regions: dict[str, Region] = {}
        reap(folder)

    def register(self, buffers: Sequence[memoryview]) -> Region:
        """Copies the buffers once into a new file. Raises TransportError when shared memory is full."""
        size = sum(buffer.nbytes for buffer in buffers)
        generation = next(_generations)
        region = Region(name=f"{self._stem}.{generation}", size=size, generation=generation)
        path = self._folder / region.name
        part = path.with_name(f"{region.name}.part")
        try:
            with part.open("xb", buffering=0) as file:
                os.fchmod(file.fileno(), 0o600)
                # Reserved now: a full memory file system would otherwise kill the writer with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, DATA_AT + size)
                file.write(HEADER.pack(MAGIC, generation, size, 1, 0))
                file.seek(DATA_AT)
                for buffer in buffers:
                    _write_all(file.fileno(), buffer.cast("B"))
            part.rename(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise TransportError(f"cannot expose {size} bytes in {self._folder}: {error}") from error
        self._regions[region.name] = region
        return region

    def describe(self, region: Region) -> bytes:
        """See Transport."""
        return msgspec.msgpack.encode(
            _Description(host=_host(), name=region.name, size=region.size, generation=region.generation)
        )

    def pull(self, description: bytes, into: memoryview, ranges: Sequence[Range] | None, deadline: float) -> None:
        """See Transport. Reads only regions of its own host."""
        wanted = _decode(description)
        spans = [(0, wanted.size)] if ranges is None else list(ranges)
        total = sum(size for _, size in spans)
        if total != into.nbytes or any(at < 0 or size < 0 or at + size > wanted.size for at, size in spans):
            raise TransportError(f"{wanted.name}: ranges of {total} bytes do not fit {into.nbytes} of {wanted.size}")
        target = into.cast("B")
        with _Mapping(self._folder / wanted.name, wanted) as source:
            filled = 0
            for at, size in spans:
                for start in range(0, size, CHUNK_BYTES):
                    if time.monotonic() > deadline:
                        raise TransportError(f"{wanted.name}: pulled {filled} of {total} bytes when time was up")
                    step = min(CHUNK_BYTES, size - start)
                    target[filled : filled + step] = source.data[at + start : at + start + step]
                    filled += step
            source.require_live()

    def acknowledge(self, description: bytes) -> None:
        """See Transport."""
        wanted = _decode(description)
        with _Mapping(self._folder / wanted.name, wanted) as source:
            source.add_acknowledgement()

    def acknowledged(self, region: Region) -> int:
        """See Transport. 0 once the region is released."""
        try:
            return HEADER.unpack((self._folder / region.name).read_bytes()[: HEADER.size])[4]
        except FileNotFoundError:
            return 0

    def release(self, region: Region) -> None:
        """See Transport. A reader under way still maps whole bytes, but its pull is refused at the end."""
        if self._regions.pop(region.name, None) is None:
            return
        path = self._folder / region.name
        try:
            with path.open("r+b", buffering=0) as file:
                os.pwrite(file.fileno(), bytes(8), LIVE_AT)
        except FileNotFoundError:
            return
        path.unlink(missing_ok=True)

    def close(self) -> None:
        """See Transport."""
        for region in list(self._regions.values()):
            self.release(region)


class _Mapping:
    """A region's file, mapped by a reader, that is the one described."""

    def __init__(self, path: Path, wanted: _Description) -> None:
        self._path, self._wanted = path, wanted

    def __enter__(self) -> "_Mapping":
        if self._wanted.host != _host():
            raise TransportError(f"{self._wanted.name} lies on {self._wanted.host}; shared memory does not reach there")
        try:
            self._file = self._path.open("r+b", buffering=0)
        except OSError as error:
            raise TransportError(f"{self._wanted.name} is gone: {error}") from error
        self._map = mmap.mmap(self._file.fileno(), 0)
        self._view = memoryview(self._map)
        self.data = self._view[DATA_AT : DATA_AT + self._wanted.size]
        try:
            self.require_live()
        except TransportError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.data.release()
        self._view.release()
        self._map.close()
        self._file.close()

    def require_live(self) -> None:
        """Raise unless this is still the live registration that was described."""
        magic, generation, size, is_live, _ = HEADER.unpack_from(self._view)
        wanted = self._wanted
        if magic != MAGIC or (generation, size) != (wanted.generation, wanted.size):
            raise TransportError(f"{wanted.name} is generation {generation}, wanted {wanted.generation}")
        if not is_live:
            raise TransportError(f"{wanted.name} is released")

    def add_acknowledgement(self) -> None:
        """Count one more reader; readers exclude each other by a file lock."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        (count,) = struct.unpack_from("<Q", self._view, ACKNOWLEDGED_AT)
        struct.pack_into("<Q", self._map, ACKNOWLEDGED_AT, count + 1)
        fcntl.flock(self._file, fcntl.LOCK_UN)


def reap(folder: Path = SHARED_MEMORY) -> list[str]:
    """Remove the files of owners that are dead; returns their names. Others' are left alone."""
    removed = []
    for path in folder.glob(f"{PREFIX}.*"):
        if is_dead(".".join(path.name.split(".")[2:5])):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    if removed:
        log.info("shm removed=%d of dead owners", len(removed))
    return removed


def _host() -> str:
    """Host and boot: shared memory does not survive either."""
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def _decode(description: bytes) -> _Description:
    try:
        return msgspec.msgpack.decode(description, type=_Description)
    except msgspec.DecodeError as error:
        raise TransportError(f"not a description of shared memory: {error}") from error


def _write_all(descriptor: int, buffer: memoryview) -> None:
    """One write call stops at 2 GiB."""
    at = 0
    while at < len(buffer):
        at += os.write(descriptor, buffer[at:])
