"""An SQLite index over a run's logs: for looking things up, never the truth. It can be dropped and rebuilt.

SQLite's WAL does not work on network file systems, so it keeps a plain rollback journal without syncing: a
damaged or missing index is rebuilt from the logs.
"""

import sqlite3
from pathlib import Path

from gyre.store import records

SCHEMA = """
CREATE TABLE rollouts (rollout TEXT PRIMARY KEY, task TEXT, purpose TEXT, grp INTEGER, state TEXT,
                       dispatched_at REAL, changed_at REAL, reward REAL, detail TEXT);
CREATE TABLE turns (rollout TEXT, turn INTEGER, offset INTEGER, tokens INTEGER, moved INTEGER,
                    PRIMARY KEY (rollout, turn));
CREATE TABLE steps (step INTEGER PRIMARY KEY, version INTEGER, reward REAL, grad_norm REAL, checkpoint TEXT);
"""


class Index:
    """The open index of a run folder."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        if fresh:
            path.unlink(missing_ok=True)
        is_new = not path.exists()
        self._db = sqlite3.connect(path, timeout=5.0)
        self._db.execute("PRAGMA synchronous = OFF")
        if is_new:
            self._db.executescript(SCHEMA)

    def add(self, record: records.Record, offset: int) -> None:
        """Index one record of the logs; most kinds are not indexed."""
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
                self._db.execute(
                    "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?, ?)",
                    (record.rollout, record.turn, offset, len(record.output_tokens) // 4, record.moved),
                )
            case records.StepTrained():
                self._db.execute(
                    "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?)",
                    (record.step, record.version, record.reward_mean, record.grad_norm, record.checkpoint),
                )

    def turn_offsets(self, rollout: str) -> list[int]:
        """Offsets in tokens.log of a rollout's turns, in order."""
        rows = self._db.execute("SELECT offset FROM turns WHERE rollout = ? ORDER BY turn", (rollout,))
        return [offset for (offset,) in rows]

    def commit(self) -> None:
        """Make what was added visible to other readers."""
        self._db.commit()

    def close(self) -> None:
        """Commit and close."""
        self._db.commit()
        self._db.close()
