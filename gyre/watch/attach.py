"""The dashboard of a run, from another terminal: reads the folder's live picture, passes keys on as orders.

It needs nothing but the folder, so it works from any machine that sees it, while the run goes on and after. It
owns nothing of the run: leaving it changes nothing there.
"""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from gyre.config.choices import Dashboard
from gyre.errors import DeadlineError, StoreError
from gyre.store.orders import Order, give_order
from gyre.store.store import EVENTS, owner
from gyre.store.summary import render_summary, summarize
from gyre.watch.live import read_snapshot
from gyre.watch.screen import GONE, Painter, make_painter
from gyre.watch.snapshot import RunSnapshot
from gyre.watch.text import duration

POLL_S = 0.25
FIRST_PICTURE_WAIT_S = 15.0
SILENCE_S = 10.0
"""A run writes its picture once a second; network file systems show it a few seconds late."""

KEYS: dict[str, Order | None] = {
    "p": Order.PAUSE,
    "r": Order.RESUME,
    "c": Order.CHECKPOINT,
    "s": Order.STOP,
    "q": None,
}
FOOTER = "p pause dispatch · r resume · c checkpoint · s stop after this step · q leave"


def attach(folder: Path, *, dashboard: Dashboard, is_once: bool, stream: TextIO) -> int:
    """Show the run in `folder` on `stream` until it ends or the person leaves; `is_once`: one picture, then leave.

    Returns 0. Raises StoreError if no run lies there, DeadlineError if it shows no picture.
    """
    if not (folder / EVENTS).exists():
        raise StoreError(f"{folder} holds no run; give the run's folder, e.g. runs/quickstart")
    with _keyboard(is_wanted=not is_once) as keys:
        painter = make_painter(dashboard, stream, footer=FOOTER if keys is not None else "")
        if painter is None:
            return 0
        try:
            _Viewer(folder, painter, keys).show(is_once=is_once)
        except GONE:
            return 0  # the terminal or the pipe went away
        except KeyboardInterrupt:
            painter.end("\n")
    return 0


class _Viewer:
    """One person's view of a run."""

    def __init__(self, folder: Path, painter: Painter, keys: int | None) -> None:
        self._folder, self._painter, self._keys = folder, painter, keys
        self._newest: RunSnapshot | None = None
        self._changed_at = time.monotonic()

    def show(self, *, is_once: bool) -> None:
        """Until the run's end, or for one picture."""
        snapshot = self._first()
        if snapshot is None:
            # Ended before it ever showed anything, or a run of before there were pictures.
            self._painter.end(render_summary(summarize(self._folder)))
            return
        while True:
            snapshot = self._read() or snapshot
            self._painter.paint(self._with_silence(snapshot))
            if snapshot.ended or self._is_dead():
                self._painter.end(render_summary(summarize(self._folder)))
                return
            if is_once or not self._obey():
                self._painter.end("")
                return

    def _first(self) -> RunSnapshot | None:
        until = time.monotonic() + FIRST_PICTURE_WAIT_S
        while (snapshot := self._read()) is None:
            if owner(self._folder) == 0:
                return None
            if time.monotonic() > until:
                raise DeadlineError("the first picture", seconds=FIRST_PICTURE_WAIT_S, missing=str(self._folder))
            time.sleep(POLL_S)
        return snapshot

    def _read(self) -> RunSnapshot | None:
        snapshot = read_snapshot(self._folder)
        if snapshot is not None and snapshot != self._newest:
            self._newest, self._changed_at = snapshot, time.monotonic()
        return snapshot

    @property
    def _silence_s(self) -> float:
        return time.monotonic() - self._changed_at

    def _is_dead(self) -> bool:
        """Silent, and nobody owns the folder (which machines that do not share locks cannot tell before)."""
        return self._silence_s > SILENCE_S and owner(self._folder) == 0

    def _with_silence(self, snapshot: RunSnapshot) -> RunSnapshot:
        if snapshot.ended or self._silence_s < SILENCE_S:
            return snapshot
        text = f"error: no sign of life for {duration(self._silence_s)}; see {self._folder}/logs/front.log"
        return replace(snapshot, messages=(*snapshot.messages, text))

    def _obey(self) -> bool:
        """Wait for a key a little, and act on it; False to leave."""
        if self._keys is None:
            time.sleep(POLL_S)
            return True
        if not select.select([self._keys], [], [], POLL_S)[0]:
            return True
        key = os.read(self._keys, 1).decode(errors="replace").lower()
        if key in ("", "\x04"):
            return False
        if key in KEYS:
            order = KEYS[key]
            if order is None:
                return False
            give_order(self._folder, order)
        return True


@contextmanager
def _keyboard(*, is_wanted: bool) -> Iterator[int | None]:
    """A file descriptor that gives keys as they are pressed; None without a terminal. Restores the terminal."""
    if not is_wanted or sys.stdin is None or not sys.stdin.isatty():
        yield None
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
