"""A run's journal, played again: the scheduler is a function, so the same events must give the same commands.

A journal holds one life for each front that owned the run: it starts with `RunBegan`, and a resumed life starts
from the version that it went on from. The commands of an event directly follow it. A life that was killed may
end in the middle of its last event's commands: those that are there are compared, the rest cannot be known.
Nothing here touches a living run, and nothing is written.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, get_args

import msgspec

from gyre.errors import GyreError, StoreError, TransitionError
from gyre.schedule.commands import Command
from gyre.schedule.events import Event
from gyre.schedule.policy import SchedulerSettings
from gyre.schedule.scheduler import ResumePoint, Scheduler
from gyre.store import records
from gyre.store.store import EVENTS, read_records

T = TypeVar("T")


class ReplayError(GyreError):
    """The scheduler answers an event of the journal in another way than it did then. Names the event."""


@dataclass(slots=True, kw_only=True)
class _Moment:
    """An event and what it caused. `is_cut`: the life ended right here, perhaps before all was written."""

    number: int
    life: int
    resumed_version: int
    now: float
    event: Event
    commands: list[Command] = field(default_factory=list)
    is_cut: bool = False


def events_of(folder: Path) -> Iterator[tuple[float, Event, list[Command]]]:
    """(now, event, commands) of all lives of a run, in order; `now` in seconds of the life's own clock.

    Raises StoreError if the log is damaged or holds what this version of gyre does not know.
    """
    for moment in _moments(folder):
        yield moment.now, moment.event, moment.commands


def replay(folder: Path, settings: SchedulerSettings) -> None:
    """Handle every event of the journal again. `settings` are those that the run's scheduler had.

    Raises ReplayError at the first event that is answered otherwise or refused, StoreError as `events_of`.
    """
    scheduler, life = Scheduler(settings), -1
    for moment in _moments(folder):
        if moment.life != life:
            life = moment.life
            scheduler = Scheduler(settings, ResumePoint(version=moment.resumed_version))
        try:
            again = scheduler.handle(moment.event, moment.now)
        except (AssertionError, TransitionError) as error:
            raise ReplayError(f"{_name(moment)} is refused: {error}") from error
        if moment.is_cut:
            again = again[: len(moment.commands)]
        if again != moment.commands:
            raise ReplayError(f"{_name(moment)} {_difference(moment.commands, again)}")


def _moments(folder: Path) -> Iterator[_Moment]:
    life, resumed_version, number = 0, 0, 0
    current: _Moment | None = None
    for record in read_records(folder / EVENTS):
        if isinstance(record, records.ScheduleCommand):
            if current is None:
                raise StoreError(f"{folder / EVENTS}: the command {record.kind} at {record.now:g} s follows no event")
            current.commands.append(_rebuilt(record, get_args(Command)))
            continue
        if current is not None:
            current.is_cut = isinstance(record, records.RunBegan)
            yield current
            current = None
        match record:
            case records.RunBegan():
                life, resumed_version = life + 1, record.resumed_version
            case records.ScheduleEvent(now=now):
                event = _rebuilt(record, get_args(Event))
                current = _Moment(number=number, life=life, resumed_version=resumed_version, now=now, event=event)
                number += 1
    if current is not None:
        current.is_cut = True
        yield current


def _rebuilt(record: records.ScheduleEvent | records.ScheduleCommand, choices: tuple[type[T], ...]) -> T:
    """The dataclass that was recorded. A field too many would be dropped silently, so the names are compared."""
    try:
        one = records.from_fields(record.kind, record.values, choices)
    except msgspec.ValidationError as error:
        raise StoreError(f"the journal's {record.kind} at {record.now:g} s is of another version: {error}") from error
    if records.to_fields(one).keys() != record.values.keys():
        names = ", ".join(record.values)
        raise StoreError(f"the journal's {record.kind} at {record.now:g} s is of another version: it has {names}")
    return one


def _name(moment: _Moment) -> str:
    return f"event {moment.number} of the journal, {moment.event} at {moment.now:g} s,"


def _difference(then: list[Command], again: list[Command]) -> str:
    """The first command that differs."""
    for index in range(max(len(then), len(again))):
        old = then[index] if index < len(then) else None
        new = again[index] if index < len(again) else None
        if old != new:
            return f"differs at command {index}: then {old or 'none'}, now {new or 'none'}"
    raise AssertionError("no difference")
