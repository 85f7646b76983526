"""What happened in a run, read from its logs into one object: for the timeline and the report.

Times are seconds since the run first began; a resumed run's lives stand where they were in wall-clock time. Cells'
phases come from the journal: the scheduler's events and commands, put through its own table of transitions. The
run may still be going on: what is open has `end` None. Nothing is decided here and nothing is written.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gyre.schedule.cells import TABLE, CellState
from gyre.store import records
from gyre.store.log import read_frames
from gyre.store.store import EVENTS, TOKENS, read_records

SETTLED = ("scored", "dropped", "placeholder")
_TRIGGERS = {kind.__name__: kind for _, kind in TABLE}


@dataclass(slots=True, kw_only=True)
class Phase:
    """A cell in one state. `end` is None while it lasts."""

    cell: int
    state: CellState
    begin: float
    end: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPast:
    """One turn: when it began and ended, and what was sampled. `record` has the tokens."""

    begin: float
    end: float
    record: records.TurnDone


@dataclass(slots=True, kw_only=True)
class RolloutPast:
    """One life of a rollout: when it entered which state, its turns, what it earned."""

    rollout: str
    task: str
    purpose: str
    group: int | None
    states: list[tuple[str, float, str]] = field(default_factory=list)
    turns: list[TurnPast] = field(default_factory=list)
    moves: list[tuple[float, records.LiveRequestMoved]] = field(default_factory=list)
    reward: float | None = None
    error: str = ""

    @property
    def begin(self) -> float:
        """When it was dispatched."""
        return self.states[0][1]

    @property
    def end(self) -> float | None:
        """When it was settled."""
        state, time, _ = self.states[-1]
        return time if state in SETTLED else None

    def entered(self, state: str) -> float | None:
        """When it entered a state, if it did."""
        return next((time for name, time, _ in self.states if name == state), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """A record and when it was written."""

    time: float
    record: records.Record


@dataclass(slots=True, kw_only=True)
class History:
    """The whole run. `lives` holds each `RunBegan`; `levels` is (time, waterlevel, capacity) at each change."""

    lives: list[At] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    rollouts: list[RolloutPast] = field(default_factory=list)
    steps: list[At] = field(default_factory=list)
    micro_steps: list[At] = field(default_factory=list)
    switches: list[At] = field(default_factory=list)
    evaluations: list[At] = field(default_factory=list)
    troubles: list[At] = field(default_factory=list)
    levels: list[tuple[float, int, int]] = field(default_factory=list)
    end: float = 0.0
    ended: str = ""

    @property
    def began(self) -> records.RunBegan:
        """The newest life's first record."""
        record = self.lives[-1].record
        assert isinstance(record, records.RunBegan)
        return record

    def closed(self, phase: Phase) -> float:
        """When a phase ended, or the run's last sign of life."""
        return self.end if phase.end is None else phase.end


def read_history(folder: Path) -> History:
    """Read a run's logs. Raises StoreError if there is none or it is damaged."""
    reader = _Reader()
    for record in read_records(folder / EVENTS):
        reader.add(record)
    if (folder / TOKENS).exists():
        for offset, record in _turns(folder / TOKENS):
            reader.add_turn(offset, record)
    return reader.finish()


def _turns(path: Path) -> Iterator[tuple[int, records.TurnDone]]:
    for offset, payload in read_frames(path):
        record = records.decode(payload)
        if isinstance(record, records.TurnDone):
            yield offset, record


class _Reader:
    """Takes records in the order of the logs."""

    def __init__(self) -> None:
        self._history = History()
        self._offset, self._now = 0.0, 0.0
        self._states: dict[int, Phase] = {}
        self._rollouts: list[dict[str, RolloutPast]] = []
        self._capacity = 0
        self._loads = 0

    def add(self, record: records.Record) -> None:
        """One record of events.log."""
        history = self._history
        if isinstance(record, records.RunBegan):
            self._begin(record)
            return
        self._now = max(self._now, self._offset + _time_of(record, default=self._now - self._offset))
        at = At(time=self._now, record=record)
        match record:
            case records.ScheduleEvent() | records.ScheduleCommand():
                self._schedule(record.kind, record.values)
            case records.RolloutChanged():
                self._changed(record)
            case records.RolloutScored():
                one = self._rollouts[-1].get(record.rollout)
                if one is not None:
                    one.reward, one.error = (None if record.error else record.reward), record.error
            case records.LiveRequestMoved():
                if one := self._rollouts[-1].get(record.rollout):
                    one.moves.append((self._now, record))
            case records.StepTrained():
                history.steps.append(at)
            case records.MicroStepTrained():
                history.micro_steps.append(at)
            case records.Switched():
                history.switches.append(at)
            case records.Evaluated():
                history.evaluations.append(at)
            case records.Trouble() | records.HarnessError() | records.OrderTaken():
                history.troubles.append(at)
            case records.RunEnded():
                history.ended = record.reason
                self._close_phases()

    def add_turn(self, offset: int, record: records.TurnDone) -> None:
        """One turn; its life follows from where it lies in the log."""
        lives = [at for at in self._history.lives if isinstance(at.record, records.RunBegan)]
        life = max((k for k, at in enumerate(lives) if at.record.tokens_bytes <= offset), default=0)
        one = self._rollouts[life].get(record.rollout) if self._rollouts else None
        if one is None:
            return
        end = lives[life].time + record.time
        one.turns.append(TurnPast(begin=max(lives[life].time, end - record.seconds), end=end, record=record))

    def finish(self) -> History:
        """The whole."""
        self._history.end = self._now
        self._history.steps = _last_of_each_step(self._history.steps)
        return self._history

    def _begin(self, record: records.RunBegan) -> None:
        first = self._history.lives[0].record if self._history.lives else record
        assert isinstance(first, records.RunBegan)
        self._close_phases()
        self._offset = max(self._now, record.started_at - first.started_at)
        self._now = self._offset
        self._history.lives.append(At(time=self._now, record=record))
        self._history.ended = ""
        self._rollouts.append({})
        self._states = {
            cell: Phase(cell=cell, state=CellState.LOADING, begin=self._now) for cell in range(record.num_cells)
        }
        self._history.phases += self._states.values()
        self._loads = 0
        self._level()

    def _close_phases(self) -> None:
        for phase in self._states.values():
            phase.end = self._now if phase.end is None else phase.end

    def _schedule(self, kind: str, values: dict[str, object]) -> None:
        match kind:
            case "Dispatch" | "Evaluate":
                rollouts = values.get("rollouts")
                self._loads += len(rollouts) if isinstance(rollouts, (list, tuple)) else 0
            case "RolloutTerminated":
                self._loads -= 1
            case "Admit" | "Move" | "RolloutStarted" | "GroupReady" | "Tick":
                return
            case "CloseStep":
                for cell in self._states:
                    self._go(cell, kind)
            case _ if isinstance(cell := values.get("cell"), int):
                self._go(cell, kind)
        self._level()

    def _go(self, cell: int, kind: str) -> None:
        phase, trigger = self._states.get(cell), _TRIGGERS.get(kind)
        after = TABLE.get((phase.state, trigger)) if phase is not None and trigger is not None else None
        if phase is None or after is None or after is phase.state:
            return  # a late report of a refused cell, or work within a state
        phase.end = self._now
        self._states[cell] = Phase(cell=cell, state=after, begin=self._now)
        self._history.phases.append(self._states[cell])

    def _level(self) -> None:
        serving = sum(one.state in (CellState.SERVING, CellState.LOADING) for one in self._states.values())
        level = (self._now, self._loads, serving)
        if not self._history.levels or self._history.levels[-1][1:] != level[1:]:
            self._history.levels.append(level)

    def _changed(self, record: records.RolloutChanged) -> None:
        known = self._rollouts[-1]
        one = known.get(record.rollout)
        if one is None:
            one = RolloutPast(rollout=record.rollout, task=record.task, purpose=record.purpose, group=record.group)
            known[record.rollout] = one
            self._history.rollouts.append(one)
            if record.purpose == "train":
                self._loads += 1
        one.states.append((record.state, self._now, record.detail))


def _time_of(record: records.Record, *, default: float) -> float:
    """When a record was written on its life's clock; most kinds say so, the others lie next to one that does."""
    match record:
        case records.ScheduleEvent() | records.ScheduleCommand():
            return record.now
        case records.RunEnded():
            return record.wall_s
    time = getattr(record, "time", 0.0)
    return time or default


def _last_of_each_step(steps: list[At]) -> list[At]:
    """A resumed run trains some steps again: the last counts."""
    kept: list[At] = []
    for at in steps:
        while kept and step_of(kept[-1]).step >= step_of(at).step:
            kept.pop()
        kept.append(at)
    return kept


def step_of(at: At) -> records.StepTrained:
    """The record of a trained step."""
    assert isinstance(at.record, records.StepTrained), at
    return at.record
