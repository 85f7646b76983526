"""The newest picture of a run as a file in its folder, and the orders that come back the same way.

Whoever sees the folder can watch and order, on any machine. A thread of its own does both once a second, so a
slow or full file system never holds the run up; what it cannot write is told once in the log and tried again.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from gyre.errors import StoreError
from gyre.store.orders import Order, take_orders
from gyre.store.store import write_whole
from gyre.watch.snapshot import RunSnapshot

log = logging.getLogger(__name__)

LIVE = "live.json"
EVERY_S = 1.0
END_WAIT_S = 2.0

_decoder = msgspec.json.Decoder(RunSnapshot)


def write_snapshot(folder: Path, snapshot: RunSnapshot) -> None:
    """Replace the folder's picture. Raises StoreError."""
    write_whole(folder / LIVE, msgspec.json.encode(snapshot))


def read_snapshot(folder: Path) -> RunSnapshot | None:
    """The newest picture of the run in `folder`; None if there is none. Raises StoreError if it is no picture."""
    try:
        data = (folder / LIVE).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"cannot read {folder / LIVE}: {error}") from error
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StoreError(f"{folder / LIVE} is not a picture of this version of gyre: {error}") from error


class LiveFile:
    """The run's end: `update` with snapshots, `orders()` for what people told, `finish` with the last picture."""

    def __init__(self, folder: Path, *, every_s: float = EVERY_S) -> None:
        self._folder, self._every_s = folder, every_s
        self._newest: RunSnapshot | None = None
        self._orders: deque[Order] = deque()
        self._over = threading.Event()
        self._is_failing = False
        self._thread: threading.Thread | None = None

    def update(self, snapshot: RunSnapshot) -> None:
        """This is the run now; written soon."""
        self._newest = snapshot
        if self._thread is None:
            self._guard(self._forget_earlier_life)
            self._thread = threading.Thread(target=self._work, name="live", daemon=True)
            self._thread.start()

    def orders(self) -> list[Order]:
        """What people told since the last time, oldest first."""
        taken = []
        while self._orders:
            taken.append(self._orders.popleft())
        return taken

    def finish(self, snapshot: RunSnapshot) -> None:
        """Write the last picture; gives up on a file system that does not answer."""
        self._newest = snapshot
        self._over.set()
        if self._thread is None:
            self._guard(partial(write_snapshot, self._folder, snapshot))
            return
        self._thread.join(END_WAIT_S)

    def _work(self) -> None:
        written: RunSnapshot | None = None
        while True:
            is_over = self._over.is_set()
            newest = self._newest
            if newest is not None and newest is not written and self._guard(partial(self._exchange, newest)):
                written = newest
            if is_over:
                return
            self._over.wait(self._every_s)

    def _forget_earlier_life(self) -> None:
        take_orders(self._folder)
        (self._folder / LIVE).unlink(missing_ok=True)

    def _exchange(self, snapshot: RunSnapshot) -> None:
        self._orders.extend(take_orders(self._folder))
        write_snapshot(self._folder, snapshot)

    def _guard(self, act: Callable[[], object]) -> bool:
        """Whether it went well; the first failure of a row is told."""
        try:
            act()
        except (StoreError, OSError) as error:
            if not self._is_failing:
                log.warning("the live picture waits: %s", error)
            self._is_failing = True
            return False
        self._is_failing = False
        return True
