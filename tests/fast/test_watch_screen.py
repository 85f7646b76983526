"""The screen never holds the run up and never fails it, whatever the terminal does."""

import io
import os
import pty
import re
import threading

import pytest

from gyre.config.choices import Dashboard
from gyre.config.schema import WatchSettings
from gyre.watch.screen import LinePainter, LivePainter, Screen, make_painter, news
from gyre.watch.snapshot import SwitchPicture
from tests.fakes.run_snapshot import make_snapshot


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Deaf(io.StringIO):
    """A stream that does not take anything until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def write(self, text: str) -> int:
        self.let_go.wait(10)
        return super().write(text)


class Gone(io.StringIO):
    def __init__(self, error: OSError | ValueError) -> None:
        super().__init__()
        self._error = error

    def write(self, text: str) -> int:
        raise self._error


def settings(dashboard: Dashboard) -> WatchSettings:
    return WatchSettings(dashboard=dashboard, refresh_s=0.01)


def test_auto_is_a_picture_on_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_painter(Dashboard.AUTO, Terminal()), LivePainter)
    assert isinstance(make_painter(Dashboard.AUTO, io.StringIO()), LinePainter)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_painter(Dashboard.AUTO, Terminal()), LinePainter)
    assert make_painter(Dashboard.OFF, Terminal()) is None


def test_the_last_picture_stays_with_the_last_words_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    screen = Screen(settings(Dashboard.RICH), stream)
    screen.update(make_snapshot())
    screen.update(make_snapshot(phase="ended"))
    screen.finish("run quickstart: finished\n")
    text = stream.getvalue()
    assert text.endswith("run quickstart: finished\n")
    assert "ended  step 12 of 40" in re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b[?1049h" not in text, "no alternate screen"
    assert "\x1b[31m" not in text and "\x1b[32m" not in text, "no colour"
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"


def test_nothing_is_written_when_off_and_words_alone_without_a_snapshot() -> None:
    stream = io.StringIO()
    screen = Screen(settings(Dashboard.OFF), stream)
    screen.update(make_snapshot())
    screen.finish("words\n")
    assert stream.getvalue() == ""
    Screen(settings(Dashboard.LINES), stream).finish("words\n")
    assert stream.getvalue() == "words\n"


@pytest.mark.parametrize("dashboard", [Dashboard.RICH, Dashboard.LINES])
def test_what_is_said_comes_before_the_last_words_with_or_without_a_picture(
    monkeypatch: pytest.MonkeyPatch, dashboard: Dashboard
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    screen = Screen(settings(dashboard), stream)
    screen.say("continuing from step-000012 [sic]")
    screen.update(make_snapshot())
    screen.say("second")
    screen.finish("words\n")
    text = stream.getvalue()
    assert text.index("continuing from step-000012 [sic]") < text.index("second") < text.rindex("words\n")


def test_saying_without_a_snapshot_does_not_spin() -> None:
    waits = []

    class Counting(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return super().wait(10)

    screen = Screen(settings(Dashboard.LINES), io.StringIO())
    screen._over = Counting()
    screen.say("hello")
    screen.finish("")
    assert len(waits) <= 1


def test_lines_come_for_news_and_every_ten_seconds() -> None:
    stream = io.StringIO()
    painter = LinePainter(stream)
    for tenth in range(250):
        painter.paint(make_snapshot(elapsed_s=tenth / 10, messages=(), switches=()))
    assert [line.split(" training")[0] for line in stream.getvalue().splitlines() if "w=" in line] == [
        "0 s", "10 s", "20 s",
    ]  # fmt: skip
    stream.truncate(0)
    stream.seek(0)
    painter.paint(make_snapshot(elapsed_s=25.0, phase="ended", messages=("error: rank 1 died",), switches=()))
    assert stream.getvalue() == "25 s ended\n25 s error: rank 1 died\n"


def test_news_are_steps_switches_evaluations_and_messages_each_told_once() -> None:
    before = make_snapshot()
    switch = SwitchPicture(cell=2, duty="rollout", seconds=1.25, at_s=204.0)
    after = make_snapshot(rewards=(*before.rewards, 0.75), switches=(*before.switches, switch), eval_after=0.8)
    assert news(before, after) == [
        "3:24 step 13 trained: reward 0.750",
        "3:24 held-out reward after: 0.800",
        "3:24 cell 2 is in rollout after 1.25 s",
    ]
    assert news(after, after) == []


@pytest.mark.parametrize("dashboard", [Dashboard.RICH, Dashboard.LINES])
@pytest.mark.parametrize(
    "error", [BrokenPipeError(32, "pipe"), OSError(5, "EIO"), ValueError("I/O operation on closed file")]
)
def test_a_terminal_that_goes_away_does_not_matter(dashboard: Dashboard, error: OSError | ValueError) -> None:
    screen = Screen(settings(dashboard), Gone(error))
    for _ in range(3):
        screen.update(make_snapshot())
    screen.finish("words")


def test_a_real_terminal_that_hangs_up_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        screen = Screen(settings(Dashboard.AUTO), stream)
        screen.update(make_snapshot())
        assert os.read(master, 10)
        os.close(master)
        screen.update(make_snapshot())
        screen.finish("words")
        with pytest.raises(OSError, match="Input/output error"):
            os.write(slave, b"x")
        # What the buffer still holds cannot be written either; close it without trying.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, slave)
        os.close(nowhere)


def test_a_terminal_that_does_not_read_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gyre.watch.screen.PAINT_END_WAIT_S", 0.05)
    stream = Deaf()
    screen = Screen(settings(Dashboard.LINES), stream)
    for _ in range(1000):
        screen.update(make_snapshot())
    screen.finish("words")
    assert "the terminal does not read" in caplog.text
    stream.let_go.set()
    next(thread for thread in threading.enumerate() if thread.name == "screen").join(10)
    assert stream.getvalue().endswith("words")


def test_a_stream_that_knows_only_ascii_gets_ascii() -> None:
    data = io.BytesIO()
    painter = LinePainter(io.TextIOWrapper(data, encoding="ascii"))
    painter.paint(make_snapshot(messages=("warning: größer",)))
    painter.end("▁▂\n")
    assert data.getvalue().endswith(b"??\n")
