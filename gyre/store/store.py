"""A run's folder: who owns it, what was written, what can be read back.

config.toml (complete: overrides are in it), events.log (all but turns), tokens.log (turns), index.sqlite, checkpoints/,
logs/, summary.json, lock. A record is in the log before what it tells has any effect. One living process owns
the folder; its lock dies with it.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gyre.errors import StoreError
from gyre.store import records
from gyre.store.index import Index
from gyre.store.log import FRAME, LogWriter, read_frame, read_frames

EVENTS, TOKENS, INDEX, CONFIG, LOCK = "events.log", "tokens.log", "index.sqlite", "config.toml", "lock"
LOCK_WAIT_S = 15.0
"""The front of a run that is being restarted may need this long to go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFound:
    """What lies in a run folder."""

    steps: int
    checkpoint: str
    ended: str
    owner_pid: int
    """The living process that owns the folder; 0 if none does, -1 if it has not told yet."""

    def describe(self) -> str:
        """One line for a person."""
        how = f"ended: {self.ended}" if self.ended else "not ended in order"
        if self.owner_pid:
            how = f"still running as pid {self.owner_pid}"
        checkpoint = f"last checkpoint {self.checkpoint}" if self.checkpoint else "no checkpoint"
        return f"{self.steps} steps trained, {checkpoint}, {how}"


def existing(folder: Path) -> RunFound | None:
    """What an earlier run left in `folder`; None if it holds none."""
    if not (folder / EVENTS).exists():
        return None
    steps, ended = 0, ""
    for record in read_records(folder / EVENTS):
        match record:
            case records.RunBegan(resumed_version=version):
                steps, ended = version, ""
            case records.StepTrained(version=version):
                steps = version
            case records.RunEnded(reason=reason):
                ended = reason
    found = sorted((folder / "checkpoints").glob("step-*"))
    checkpoint = found[-1].name if found else ""
    return RunFound(steps=steps, checkpoint=checkpoint, ended=ended, owner_pid=owner(folder))


def owner(folder: Path) -> int:
    """The pid of the living process that owns a run folder; 0 if none does."""
    try:
        fd = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return 0
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _pid_in(fd)
    finally:
        os.close(fd)
    return 0


def read_records(path: Path) -> Iterator[records.Record]:
    """All records of one log, in order. Raises StoreError if it is damaged or of another schema."""
    for offset, payload in read_frames(path):
        yield _decode(path, offset, payload)


class RunStore:
    """The owner's end of a run folder."""

    def __init__(self, folder: Path, lock_fd: int) -> None:
        """Use `open`."""
        self.folder, self._lock_fd = folder, lock_fd
        self._events = LogWriter(folder / EVENTS)
        self._tokens = LogWriter(folder / TOKENS)
        self._index = _covering_index(folder, self._sizes()) or _fill(folder, Index(folder / INDEX, fresh=True))

    @classmethod
    def open(cls, folder: Path, *, config_text: str, lock_wait_s: float = LOCK_WAIT_S) -> "RunStore":
        """Own `folder`, making it if need be. Raises StoreError if a living run owns it, naming its pid."""
        try:
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
            lock_fd = _lock(folder / LOCK, lock_wait_s)
        except OSError as error:
            raise StoreError(f"cannot make the run folder {folder}: {error}") from error
        try:
            write_whole(folder / CONFIG, config_text.encode())
            return cls(folder, lock_fd)
        except BaseException:
            os.close(lock_fd)
            raise

    @property
    def tokens_bytes(self) -> int:
        """How long tokens.log is."""
        return self._tokens.size

    def record(self, record: records.Record) -> None:
        """Write one record; it survives a kill of this process. Raises StoreError (full disk)."""
        log = self._tokens if isinstance(record, records.TurnDone) else self._events
        self._index.add(record, log.append(records.encode(record)))

    def sync(self) -> None:
        """Make all records survive a lost node."""
        self._events.sync()
        self._tokens.sync()
        self._index.commit(self._sizes())

    def close(self) -> None:
        """Give the folder up."""
        self._index.commit(self._sizes())
        self._events.close()
        self._tokens.close()
        self._index.close()
        os.close(self._lock_fd)

    def _sizes(self) -> dict[str, int]:
        return {EVENTS: self._events.size, TOKENS: self._tokens.size}


def rebuild_index(folder: Path) -> None:
    """Make the index anew from the logs. Only for a folder that no run owns."""
    _fill(folder, Index(folder / INDEX, fresh=True)).close()


def turns_of(folder: Path, rollout: str) -> list[records.TurnDone]:
    """A rollout's turns, in order: found by the index where it covers the log, else by reading the whole log.

    A resumed run begins unfinished rollouts again: only the turns of the last life are given.
    """
    path = folder / TOKENS
    index = _covering_index(folder, {TOKENS: path.stat().st_size})
    if index is not None:
        try:
            return [_turn(path, offset) for offset in index.turn_offsets(rollout)]
        finally:
            index.close()
    found: list[records.TurnDone] = []
    for record in read_records(path):
        if isinstance(record, records.TurnDone) and record.rollout == rollout:
            if found and record.node <= found[-1].node:
                found.clear()
            found.append(record)
    return sorted(found, key=lambda turn: turn.turn)


def write_whole(path: Path, data: bytes) -> None:
    """Put `data` at `path` so that a reader sees the old or the new, never a part. Raises StoreError (full disk)."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error}; free some space in {path.parent}") from error


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


def _turn(path: Path, offset: int) -> records.TurnDone:
    record = _decode(path, offset, read_frame(path, offset))
    assert isinstance(record, records.TurnDone), (path, offset, record)
    return record


def _decode(path: Path, offset: int, payload: bytes) -> records.Record:
    try:
        return records.decode(payload)
    except msgspec.DecodeError as error:
        raise StoreError(f"{path} at byte {offset}: not a record of this version of gyre: {error}") from error


def _covering_index(folder: Path, sizes: Mapping[str, int]) -> Index | None:
    """The folder's index if it is sound and covers so much of each log, and nothing else."""
    if not (folder / INDEX).exists():
        return None
    try:
        index = Index(folder / INDEX)
    except StoreError:
        return None
    covered = index.covered()
    if all(covered.get(name) == size for name, size in sizes.items()):
        return index
    index.close()
    return None


def _fill(folder: Path, index: Index) -> Index:
    sizes = {}
    for name in (EVENTS, TOKENS):
        path, size = folder / name, 0
        for offset, payload in read_frames(path) if path.exists() else ():
            index.add(_decode(path, offset, payload), offset)
            size = offset + FRAME.size + len(payload)
        sizes[name] = size
    index.commit(sizes)
    return index


def _lock(path: Path, wait_s: float) -> int:
    """Hold the lock file until this process ends; waits a little for an owner that is going."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if time.monotonic() > until:
                pid = _pid_in(fd)
                os.close(fd)
                raise StoreError(f"{path.parent} belongs to a living run (pid {pid}); stop it first") from error
            time.sleep(0.1)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _pid_in(fd: int) -> int:
    text = os.pread(fd, 32, 0).strip()
    return int(text) if text.isdigit() else -1
