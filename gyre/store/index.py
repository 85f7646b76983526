"""An SQLite index over a run's logs: for looking things up, never the truth. It can be dropped and rebuilt.

SQLite's WAL does not work on network file systems, so it keeps a plain rollback journal without syncing. It
notes how much of each log it covers: one that is missing, damaged or behind is made anew from the logs. A
failing index (full disk, a reader that holds it) never fails the run: it only falls behind.
"""

import logging
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from gyre.errors import StoreError
from gyre.store import records

log = logging.getLogger(__name__)

BUSY_WAIT_S = 0.2
"""A reader that holds the index longer than this delays it to the next commit."""

SCHEMA = """
CREATE TABLE rollouts (rollout TEXT PRIMARY KEY, task TEXT, purpose TEXT, grp INTEGER, state TEXT,
                       dispatched_at REAL, changed_at REAL, reward REAL, detail TEXT);
CREATE TABLE turns (rollout TEXT, turn INTEGER, node INTEGER, offset INTEGER, tokens INTEGER, moved INTEGER,
                    PRIMARY KEY (rollout, turn));
CREATE TABLE steps (step INTEGER PRIMARY KEY, version INTEGER, reward REAL, grad_norm REAL, checkpoint TEXT);
CREATE TABLE covered (log TEXT PRIMARY KEY, bytes INTEGER);
"""


class Index:
    """The open index of a run folder."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        """Open or make the index at `path`; `fresh` drops what is there. Raises StoreError."""
        self.path, self._has_failed = path, False
        if fresh:
            _drop(path)
        is_new = not path.exists()
        try:
            self._db = sqlite3.connect(path, timeout=BUSY_WAIT_S)
            self._db.execute("PRAGMA synchronous = OFF")
            if is_new:
                self._db.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise StoreError(f"cannot open {path}: {error}; free some space in {path.parent}") from error

    def covered(self) -> dict[str, int]:
        """Bytes of each log that the index covers; empty if it is damaged."""
        try:
            return dict(self._db.execute("SELECT log, bytes FROM covered"))
        except sqlite3.Error:
            return {}

    def add(self, record: records.Record, offset: int) -> None:
        """Index one record of the logs; most kinds are not indexed."""
        if self._has_failed:
            return
        try:
            self._add(record, offset)
        except sqlite3.Error as error:
            self._fail(error)

    def _add(self, record: records.Record, offset: int) -> None:
        match record:
            case records.RolloutChanged():
                self._db.execute(
                    "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?) ON CONFLICT (rollout) DO UPDATE SET "
                    "state = excluded.state, changed_at = excluded.changed_at, detail = excluded.detail",
                    (record.rollout, record.task, record.purpose, record.group, record.state, record.time,
                     record.time, record.detail),
                )  # fmt: skip
            case records.RolloutScored():
                self._db.execute("UPDATE rollouts SET reward = ? WHERE rollout = ?", (record.reward, record.rollout))
            case records.TurnDone():
                # Nodes count up within one life of a rollout; a resumed run begins it again.
                self._db.execute(
                    "DELETE FROM turns WHERE rollout = ?1 AND (SELECT max(node) FROM turns WHERE rollout = ?1) >= ?2",
                    (record.rollout, record.node),
                )
                self._db.execute(
                    "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?)",
                    (record.rollout, record.turn, record.node, offset, len(record.output_tokens) // 4, record.moved),
                )
            case records.StepTrained():
                self._db.execute(
                    "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)",
                    (record.step, record.version, record.reward_mean, record.grad_norm, record.checkpoint),
                )

    def turn_offsets(self, rollout: str) -> list[int]:
        """Offsets in tokens.log of a rollout's turns, in order; of its last life, if a resumed run began it again."""
        rows = self._db.execute("SELECT offset FROM turns WHERE rollout = ? ORDER BY turn", (rollout,))
        return [offset for (offset,) in rows]

    def commit(self, sizes: Mapping[str, int]) -> None:
        """Make what was added visible to readers; `sizes`: bytes of each log that were added so far."""
        if self._has_failed:
            return
        try:
            self._db.executemany("INSERT OR REPLACE INTO covered VALUES (?, ?)", sizes.items())
            self._db.commit()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                self._fail(error)
        except sqlite3.Error as error:
            self._fail(error)

    def close(self) -> None:
        """Close; what was not committed is lost."""
        self._db.close()

    def _fail(self, error: sqlite3.Error) -> None:
        """Stop indexing; the next start makes the index anew, since it covers less than the logs hold."""
        log.warning("index stops path=%s error=%s", self.path, error)
        self._has_failed = True


def _drop(path: Path) -> None:
    for old in (path, path.with_name(path.name + "-journal")):
        old.unlink(missing_ok=True)
