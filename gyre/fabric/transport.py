"""How bytes move between ranks: the reader pulls, the owner is not disturbed, nobody meets.

An owner registers buffers as one region and hands out its description; a reader pulls ranges of it. The layer
above relies on three promises of every backend: a pull either copies all of its ranges from the very region
that was described or raises TransportError (gone, released, another generation, too late); the destination
counts only when `pull` has returned; nothing outlives its owner for long.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Range = tuple[int, int]
"""(offset, size) in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A registered region of the owner: its name at the backend, its size, and which registration it is."""

    name: str
    size: int
    generation: int


class Transport(Protocol):
    """One backend, in one process. Deadlines are `time.monotonic()` values."""

    def register(self, buffers: Sequence[memoryview]) -> Region:
        """Make the buffers, end to end, readable by others."""
        ...

    def describe(self, region: Region) -> bytes:
        """What a reader needs; may be sent anywhere."""
        ...

    def pull(self, description: bytes, into: memoryview, ranges: Sequence[Range] | None, deadline: float) -> None:
        """Copy `ranges` (None: everything) one behind the other into `into`, whose size is their sum.

        `into` is undefined unless this returns. Raises TransportError.
        """
        ...

    def acknowledge(self, description: bytes) -> None:
        """Tell the owner that this reader has what it wanted. Raises TransportError when the region is gone."""
        ...

    def acknowledged(self, region: Region) -> int:
        """How many readers have acknowledged a region of this owner."""
        ...

    def release(self, region: Region) -> None:
        """Refuse every later pull, and those under way; give the memory back. May be repeated."""
        ...

    def close(self) -> None:
        """Release all regions of this owner."""
        ...
