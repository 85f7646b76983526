"""Where snapshots become visible: a live picture on a terminal, or plain lines, or nothing.

A thread of its own paints, so that neither drawing nor a terminal that stopped reading ever holds the run up:
`update` only leaves the newest snapshot. A terminal that goes away ends the painting, never the run. Plain
lines come at each change worth one, and at most every `LINE_EVERY_S` otherwise.
"""

import errno
import logging
import os
import sys
import threading
from collections import deque
from typing import Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from gyre.config.choices import Dashboard
from gyre.config.schema import WatchSettings
from gyre.watch.dashboard import plain_line, render
from gyre.watch.snapshot import RunSnapshot
from gyre.watch.text import duration

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0
MAX_WORDS = 100
PAINT_END_WAIT_S = 2.0
GONE = (OSError, ValueError)
"""What writing to a terminal that went away raises: EIO or EPIPE, and ValueError once the file is closed."""


class Painter(Protocol):
    """Puts snapshots on a stream. May raise `GONE`; nothing is painted after that."""

    def paint(self, snapshot: RunSnapshot) -> None:
        """Show a snapshot."""
        ...

    def say(self, text: str) -> None:
        """Write a line that stays, above the picture if there is one."""
        ...

    def end(self, text: str) -> None:
        """Leave the last picture standing and write `text` below it."""
        ...


class Screen:
    """The run's screen. `stream` defaults to standard output."""

    def __init__(self, settings: WatchSettings, stream: TextIO | None = None) -> None:
        # A process that was started with its standard output closed has none.
        out = stream if stream is not None else sys.stdout
        self._refresh_s = settings.refresh_s
        self._painter = make_painter(settings.dashboard, out) if out is not None else None
        self._newest: RunSnapshot | None = None
        self._last_words = ""
        # Bounded, since a terminal that does not read takes nothing away.
        self._words: deque[str] = deque(maxlen=MAX_WORDS)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def update(self, snapshot: RunSnapshot) -> None:
        """Show this from now on; costs nothing, paints later. Never raises for the terminal's sake."""
        self._newest = snapshot
        self._start()

    def say(self, text: str) -> None:
        """Write a line that must be seen and stays, before the next picture. Never raises for the terminal's sake."""
        self._words.append(text)
        self._start()

    def _start(self) -> None:
        if self._thread is None and self._painter is not None:
            self._thread = threading.Thread(target=self._paint, name="screen", daemon=True)
            self._thread.start()

    def finish(self, text: str) -> None:
        """Paint the last snapshot, write `text` below it and stop; gives up on a terminal that does not read."""
        self._last_words = text
        self._over.set()
        if self._thread is None:
            if self._painter is not None:
                self._guard(self._newest, is_over=True)
            return
        self._thread.join(PAINT_END_WAIT_S)
        if self._thread.is_alive():
            log.warning("the terminal does not read; the last picture is lost wait_s=%g", PAINT_END_WAIT_S)

    def _paint(self) -> None:
        painted: RunSnapshot | None = None
        is_first = True
        try:
            while True:
                is_over = self._over.is_set() if is_first else self._over.wait(self._refresh_s)
                is_first = False
                newest = self._newest
                if not self._guard(newest if newest is not painted else None, is_over=is_over) or is_over:
                    return
                painted = newest
        except Exception:  # the outer shell of this thread: a picture that cannot be drawn must not end the run
            log.exception("the screen ends")

    def _guard(self, snapshot: RunSnapshot | None, *, is_over: bool) -> bool:
        """Paint, and end if it is over; False once the terminal is gone."""
        painter = self._painter
        assert painter is not None
        try:
            while self._words:
                painter.say(self._words.popleft())
            if snapshot is not None:
                painter.paint(snapshot)
            if is_over:
                painter.end(self._last_words)
        except GONE as error:
            log.warning("the terminal is gone: %s", error)
            return False
        return True


def make_painter(choice: Dashboard, stream: TextIO, footer: str = "") -> Painter | None:
    """The painter for `stream`; None if nothing is to be shown. `auto` is rich on a capable terminal.

    `footer` is a line below a live picture.
    """
    match choice:
        case Dashboard.OFF:
            return None
        case Dashboard.LINES:
            return LinePainter(stream)
        case Dashboard.RICH:
            return LivePainter(stream, footer)
        case Dashboard.AUTO:
            is_capable = stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")
            return LivePainter(stream, footer) if is_capable else LinePainter(stream)


class _Console(Console):
    """rich would end the process when its pipe breaks; here the painter's caller decides."""

    def on_broken_pipe(self) -> None:
        """Let the error through (called while it is being handled)."""
        raise BrokenPipeError(errno.EPIPE, "the reader is gone")


class LivePainter:
    """One picture, redrawn in place; the last one stays. Honours NO_COLOR."""

    def __init__(self, stream: TextIO, footer: str = "") -> None:
        self._footer = footer
        self._console = _Console(file=stream, force_terminal=True, highlight=False, soft_wrap=False)
        self._live: Live | None = None

    def paint(self, snapshot: RunSnapshot) -> None:
        """Redraw."""
        picture = self._picture(snapshot)
        if self._live is None:
            self._live = Live(
                picture,
                console=self._console,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
            self._live.start(refresh=True)
        else:
            self._live.update(picture, refresh=True)

    def say(self, text: str) -> None:
        """Above the picture, which rich redraws below."""
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()

    def end(self, text: str) -> None:
        """Let the last picture stand."""
        if self._live is not None:
            self._live.stop()
        self._console.print(Text(text), end="", soft_wrap=True)
        self._console.file.flush()

    def _picture(self, snapshot: RunSnapshot) -> RenderableType:
        width, height = self._console.width, self._console.height
        if not self._footer:
            return render(snapshot, width, height)
        footer = Text(self._footer, style="dim", no_wrap=True, overflow="ellipsis")
        return Group(render(snapshot, width, height - 1), footer)


class LinePainter:
    """Plain lines: each change worth telling, and now and then how far the run is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last: RunSnapshot | None = None
        self._next_line_s = 0.0

    def paint(self, snapshot: RunSnapshot) -> None:
        """Write what changed since the last snapshot, or the run's line when it is due."""
        now = snapshot.elapsed_s
        lines = news(self._last, snapshot)
        if lines or self._last is None or now >= self._next_line_s:
            if now >= self._next_line_s or self._last is None:
                lines.append(plain_line(snapshot))
                self._next_line_s = now + LINE_EVERY_S
            self._write("".join(f"{line}\n" for line in lines))
        self._last = snapshot

    def say(self, text: str) -> None:
        """Write the line."""
        self._write(f"{text}\n")

    def end(self, text: str) -> None:
        """Write the last words."""
        self._write(text)

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def news(before: RunSnapshot | None, now: RunSnapshot) -> list[str]:
    """One line for each thing between two snapshots that a person would want to know."""
    at = duration(now.elapsed_s)
    lines = []
    if before is not None and before.phase != now.phase:
        lines.append(f"{at} {now.phase}")
    old_rewards = len(before.rewards) if before else 0
    lines += [
        f"{at} step {len(now.rewards) - len(now.rewards[old_rewards:]) + index + 1} trained: reward {reward:.3f}"
        for index, reward in enumerate(now.rewards[old_rewards:])
    ]
    for name in ("before", "after"):
        value = getattr(now, f"eval_{name}")
        if value is not None and (before is None or getattr(before, f"eval_{name}") is None):
            lines.append(f"{at} held-out reward {name}: {value:.3f}")
    old_switches = before.switches if before else ()
    lines += [
        f"{at} cell {switch.cell} is in {switch.duty} after {switch.seconds:.2f} s"
        for switch in now.switches
        if switch not in old_switches
    ]
    old_orders = before.orders if before else ()
    lines += [f"{at} ordered: {order}" for order in now.orders if order not in old_orders]
    old_messages = before.messages if before else ()
    lines += [f"{at} {message}" for message in now.messages if message not in old_messages]
    return lines
