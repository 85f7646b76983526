"""The journal gives back what the scheduler got and said, and replaying it gives the same commands."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from gyre.errors import StoreError
from gyre.program.replay import ReplayError, events_of, replay
from gyre.schedule.commands import Abort, Command
from gyre.schedule.events import CellServing, Event, RolloutStarted
from gyre.schedule.policy import SchedulerSettings
from gyre.schedule.scheduler import ResumePoint, Scheduler
from gyre.store import records
from gyre.store.store import RunStore, journal
from tests.fakes.run_records import began
from tests.fakes.scheduling_world import SchedulingWorld

PLAN = SchedulerSettings(
    num_cells=3, cell_capacity=6, steps=3, groups_per_batch=2, rollouts_per_group=3, staleness=0.5, is_held=True
)

Moment = tuple[Event, float, list[Command]]


def played(plan: SchedulerSettings = PLAN, *, seed: int = 3) -> SchedulingWorld:
    world = SchedulingWorld(plan, seed=seed, evaluations=4)
    world.run()
    return world


def as_records(moments: Sequence[Moment]) -> list[records.Record]:
    return [
        record
        for event, now, commands in moments
        for record in (
            records.schedule_event(now, event),
            *(records.schedule_command(now, command) for command in commands),
        )
    ]


def written(folder: Path, *parts: Sequence[records.Record]) -> Path:
    store = RunStore.open(folder, config_text="", lock_wait_s=0.0)
    for part in parts:
        for record in part:
            store.record(record)
    store.close()
    return folder


ENDED = [records.RunEnded(reason="finished", wall_s=1.0)]


@pytest.mark.parametrize("seed", range(4))
def test_events_and_commands_come_back_as_they_were_and_replay_to_the_same(tmp_path: Path, seed: int) -> None:
    world = played(seed=seed)
    written(tmp_path, [began()], as_records(world.journal), ENDED)
    assert [(event, now, commands) for now, event, commands in events_of(tmp_path)] == world.journal
    assert len(list(journal(tmp_path))) == len(world.journal)
    replay(tmp_path, world.settings)


def test_these_runs_hold_every_command_but_abort() -> None:
    kinds = {type(one) for seed in range(4) for _, _, commands in played(seed=seed).journal for one in commands}
    assert set(get_args(Command)) - kinds == {Abort}


def test_other_settings_are_found_at_the_first_event_that_differs(tmp_path: Path) -> None:
    world = played()
    written(tmp_path, [began()], as_records(world.journal), ENDED)
    with pytest.raises(ReplayError, match=r"event \d+ of the journal, .* differs at command \d+: then .*, now "):
        replay(tmp_path, replace(world.settings, cell_capacity=2))


def test_a_command_that_is_missing_changed_or_too_many_is_named(tmp_path: Path) -> None:
    moments = played().journal
    at = next(index for index, (_, _, commands) in enumerate(moments) if len(commands) > 1)
    event, now, commands = moments[at]
    for name, wrong in {"fewer": commands[:-1], "swapped": commands[::-1], "more": [*commands, commands[0]]}.items():
        harmed = [*moments[:at], (event, now, wrong), *moments[at + 1 :]]
        written(tmp_path / name, [began()], as_records(harmed), ENDED)
        with pytest.raises(ReplayError, match=f"^event {at} of the journal, {type(event).__name__}"):
            replay(tmp_path / name, PLAN)


def test_an_event_that_the_scheduler_refuses_is_a_difference(tmp_path: Path) -> None:
    moments: list[Moment] = [(RolloutStarted(rollout="9.9"), 1.0, [])]
    written(tmp_path, [began()], as_records(moments), ENDED)
    with pytest.raises(ReplayError, match=r"^event 0 of the journal, RolloutStarted.* is refused"):
        replay(tmp_path, PLAN)


def test_a_killed_life_may_end_within_its_last_commands_and_a_resumed_one_begins_anew(tmp_path: Path) -> None:
    first = played().journal
    at = next(index for index, (_, _, commands) in enumerate(first) if index > 20 and len(commands) > 1)
    killed = as_records(first[: at + 1])
    cut = killed[: -len(first[at][2]) + 1]
    resumed = Scheduler(PLAN, ResumePoint(version=1))
    second: list[Moment] = []
    for cell in range(PLAN.num_cells):
        event, now = CellServing(cell=cell, version=1), float(cell)
        second.append((event, now, resumed.handle(event, now)))
    written(tmp_path, [began()], cut, [began(resumed_version=1)], as_records(second), ENDED)
    replay(tmp_path, PLAN)
    assert len(list(events_of(tmp_path))) == at + 1 + len(second)
    written(tmp_path / "torn", [began()], cut)
    replay(tmp_path / "torn", PLAN)


def test_commands_missing_before_the_end_are_no_torn_tail(tmp_path: Path) -> None:
    first = played().journal
    at = next(index for index, (_, _, commands) in enumerate(first) if len(commands) > 1)
    cut = as_records(first[: at + 1])[:-1]
    written(tmp_path, [began()], cut, ENDED)
    with pytest.raises(
        ReplayError, match=f"^event {at} of the journal, .* differs at command {len(first[at][2]) - 1}: then none"
    ):
        replay(tmp_path, PLAN)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (records.ScheduleEvent(now=1.0, kind="CellMelted", values={}), "a CellMelted"),
        (records.ScheduleEvent(now=1.0, kind="CellDrained", values={}), "CellDrained at 1 s is of another version"),
        (
            records.ScheduleEvent(now=1.0, kind="CellDrained", values={"cell": 1, "why": ""}),
            "CellDrained at 1 s is of another version: it has cell, why",
        ),
        (records.ScheduleCommand(now=1.0, kind="Finish", values={}), "the command Finish at 1 s follows no event"),
    ],
)
def test_what_this_version_does_not_know_is_named(tmp_path: Path, record: records.Record, told: str) -> None:
    written(tmp_path, [began()], [record])
    with pytest.raises(StoreError, match=told):
        list(events_of(tmp_path))
