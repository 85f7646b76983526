"""A run's folder: who owns it, what was written, what can be read back.

config.toml (as started), events.log (everything but turns), tokens.log (turns), index.sqlite, checkpoints/,
logs/, summary.json, lock. A record is in the log before what it tells has any effect. One living process owns
the folder; its lock dies with it.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre.errors import StoreError
from gyre.store import records
from gyre.store.index import Index
from gyre.store.log import LogWriter, read_frames

EVENTS, TOKENS, INDEX, CONFIG, LOCK = "events.log", "tokens.log", "index.sqlite", "config.toml", "lock"
LOCK_WAIT_S = 15.0
"""The front of a run that is being restarted may need this long to go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFound:
    """What lies in a run folder."""

    steps: int
    checkpoint: str
    ended: str

    def describe(self) -> str:
        """One line for a person."""
        how = f"ended: {self.ended}" if self.ended else "not ended in order"
        checkpoint = f"last checkpoint {self.checkpoint}" if self.checkpoint else "no checkpoint"
        return f"{self.steps} steps trained, {checkpoint}, {how}"


def existing(folder: Path) -> RunFound | None:
    """What an earlier run left in `folder`; None if it holds none."""
    if not (folder / EVENTS).exists():
        return None
    steps, ended = 0, ""
    for record in read_records(folder / EVENTS):
        match record:
            case records.RunBegan():
                ended = ""
            case records.StepTrained(version=version):
                steps = version
            case records.RunEnded(reason=reason):
                ended = reason
    found = sorted((folder / "checkpoints").glob("step-*"))
    return RunFound(steps=steps, checkpoint=found[-1].name if found else "", ended=ended)


def read_records(path: Path) -> Iterator[records.Record]:
    """All records of one log, in order."""
    for _, payload in read_frames(path):
        yield records.decode(payload)


class RunStore:
    """The owner's end of a run folder."""

    def __init__(self, folder: Path, lock_fd: int) -> None:
        """Use `create` or `resume`."""
        self.folder, self._lock_fd = folder, lock_fd
        self._events = LogWriter(folder / EVENTS)
        self._tokens = LogWriter(folder / TOKENS)
        is_whole = not (self._events.cut_bytes or self._tokens.cut_bytes) and (folder / INDEX).exists()
        self._index = Index(folder / INDEX, fresh=not is_whole)
        if not is_whole:
            rebuild_index(folder, self._index)

    @classmethod
    def open(cls, folder: Path, *, config_text: str) -> "RunStore":
        """Own `folder`, making it if need be. Raises StoreError if a living run owns it, naming its pid."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints").mkdir(exist_ok=True)
        lock_fd = _lock(folder / LOCK)
        (folder / CONFIG).write_text(config_text)
        return cls(folder, lock_fd)

    def record(self, record: records.Record) -> None:
        """Write one record; it survives a kill of this process. Raises StoreError (full disk)."""
        log = self._tokens if isinstance(record, records.TurnDone) else self._events
        self._index.add(record, log.append(records.encode(record)))

    def sync(self) -> None:
        """Make all records survive a lost node."""
        self._events.sync()
        self._tokens.sync()
        self._index.commit()

    def close(self) -> None:
        """Give the folder up."""
        self._events.close()
        self._tokens.close()
        self._index.close()
        os.close(self._lock_fd)


def rebuild_index(folder: Path, index: Index | None = None) -> None:
    """Make the index anew from the logs."""
    index = index or Index(folder / INDEX, fresh=True)
    for name in (EVENTS, TOKENS):
        if (folder / name).exists():
            for offset, payload in read_frames(folder / name):
                index.add(records.decode(payload), offset)
    index.commit()


def turns_of(folder: Path, rollout: str) -> list[records.TurnDone]:
    """A rollout's turns, in order, read from the log itself."""
    found = [
        record
        for record in read_records(folder / TOKENS)
        if isinstance(record, records.TurnDone) and record.rollout == rollout
    ]
    return sorted(found, key=lambda turn: turn.turn)


def journal(folder: Path) -> Iterator[tuple[records.ScheduleEvent, list[records.ScheduleCommand]]]:
    """The scheduler's events with the commands each caused, in order."""
    event: records.ScheduleEvent | None = None
    commands: list[records.ScheduleCommand] = []
    for record in read_records(folder / EVENTS):
        match record:
            case records.ScheduleEvent():
                if event is not None:
                    yield event, commands
                event, commands = record, []
            case records.ScheduleCommand():
                commands.append(record)
    if event is not None:
        yield event, commands


def _lock(path: Path) -> int:
    """Hold the lock file until this process ends; waits a little for an owner that is going."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if time.monotonic() > until:
                owner = os.pread(fd, 32, 0).decode(errors="replace").strip()
                os.close(fd)
                raise StoreError(f"{path.parent} belongs to a living run (pid {owner}); stop it first") from error
            time.sleep(0.1)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
