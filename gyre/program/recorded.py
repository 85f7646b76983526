"""A recorded run as a workload: what the simulator needs of a run folder, as plain numbers.

Lengths are those measured, from a rollout's first route to its end, so they hold the load of the run that was
recorded: they are replayed at face value (`tool_share` 1). Only the last life of a run that went on is read.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median

from gyre.config.load import load_settings
from gyre.errors import StoreError
from gyre.program.replay import events_of
from gyre.schedule.commands import Admit, CloseStep, Dispatch, Drain, JoinStep, LoadWeights, ReturnToRollout
from gyre.schedule.events import CellJoined, CellServing, GroupReady, RolloutTerminated, StepPublished
from gyre.schedule.policy import SchedulerSettings
from gyre.simulate.cluster import Cluster
from gyre.simulate.workload import GroupWork, Workload
from gyre.store import records
from gyre.store.store import EVENTS, read_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run's plan, the costs it measured and its workload. `seconds`: first dispatch to last publication."""

    plan: SchedulerSettings
    cluster: Cluster
    workload: Workload
    seconds: float
    switches: int


@dataclass(slots=True, kw_only=True)
class _Times:
    """What the journal says, in seconds of its clock."""

    dispatched: list[int] = field(default_factory=list)
    first_dispatch: float | None = None
    admitted: dict[str, float] = field(default_factory=dict)
    lengths: dict[str, float] = field(default_factory=dict)
    last_end: dict[int, float] = field(default_factory=dict)
    grading: dict[int, float] = field(default_factory=dict)
    order: list[tuple[int, int]] = field(default_factory=list)
    to_training: list[float] = field(default_factory=list)
    to_rollout: list[float] = field(default_factory=list)
    pulls: list[float] = field(default_factory=list)
    optimizer: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    switches: int = 0


def read_recorded(folder: Path) -> Recorded:
    """Raises StoreError if the run published no step, or its journal cannot be read."""
    settings = load_settings(folder / "config.toml")
    times = _times(folder)
    if not times.published or times.first_dispatch is None:
        raise StoreError(f"{folder}: no published step to compare with")
    num_steps = len(times.published)
    groups_per_batch = settings.schedule.groups_per_batch
    needed = num_steps * groups_per_batch
    plan = replace(SchedulerSettings.of(settings), steps=num_steps)
    cluster = Cluster(
        tool_share=1.0,
        half_speed_rollouts=1.0,
        optimizer_s=_mean(times.optimizer),
        switch_to_training_s=_mean(times.to_training),
        switch_to_rollout_s=max(_mean(times.to_rollout) - _mean(times.pulls), 0.0),
        pull_s=_mean(times.pulls),
        move_s=0.0,
        grading_s=median(times.grading.values()) if times.grading else 0.0,
    )
    lengths, members = list(times.lengths.values()), range(plan.rollouts_per_group)
    work = _micro_steps(folder, times, groups_per_batch)
    groups = tuple(
        GroupWork(
            rollouts_s=tuple(times.lengths.get(f"{group}.{member}", fmean(lengths)) for member in members),
            micro_steps_s=tuple(work.get(group, ())),
            grading_s=times.grading.get(group),
        )
        for group in range(needed)
    )
    return Recorded(
        plan=plan,
        cluster=cluster,
        workload=Workload(groups=groups, limit_s=max(lengths)),
        seconds=times.published[-1] - times.first_dispatch,
        switches=times.switches,
    )


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def _times(folder: Path) -> _Times:
    """One pass over the journal."""
    times = _Times()
    drained: dict[int, float] = {}
    returning: dict[int, float] = {}
    pulling: dict[int, float] = {}
    closed = 0.0
    for now, event, commands in events_of(folder):
        match event:
            case RolloutTerminated(rollout=rollout) if rollout in times.admitted:
                times.lengths[rollout] = now - times.admitted[rollout]
                times.last_end[int(rollout.partition(".")[0])] = now
            case GroupReady(group=group, num_micro_steps=num):
                times.grading[group] = now - times.last_end.get(group, now)
                times.order.append((group, num))
            case CellJoined(cell=cell) if cell in drained:
                times.to_training.append(now - drained.pop(cell))
            case CellServing(cell=cell) if cell in returning:
                times.to_rollout.append(now - returning.pop(cell))
            case CellServing(cell=cell) if cell in pulling:
                times.pulls.append(now - pulling.pop(cell))
            case StepPublished():
                times.optimizer.append(now - closed)
                times.published.append(now)
        for command in commands:
            match command:
                case Dispatch(group=group):
                    times.dispatched.append(group)
                    times.first_dispatch = now if times.first_dispatch is None else times.first_dispatch
                case Admit(rollout=rollout) if rollout.partition(".")[0].isdecimal():
                    times.admitted.setdefault(rollout, now)
                case Drain(cell=cell):
                    drained[cell] = now
                    times.switches += 1
                case ReturnToRollout(cell=cell):
                    drained.pop(cell, None)
                    returning[cell] = now
                    times.switches += 1
                case LoadWeights(cell=cell):
                    pulling[cell] = now
                case CloseStep():
                    closed = now
                case JoinStep():
                    pass
    return times


def _micro_steps(folder: Path, times: _Times, groups_per_batch: int) -> dict[int, list[float]]:
    """Seconds of every group's micro-steps: indices of a step are in order of the groups' readiness."""
    seconds = {
        (record.step, record.index): record.seconds
        for record in read_records(folder / EVENTS)
        if isinstance(record, records.MicroStepTrained)
    }
    mean = _mean(list(seconds.values()))
    next_index: dict[int, int] = {}
    work: dict[int, list[float]] = {}
    for group, num in times.order:
        step = group // groups_per_batch
        first = next_index.get(step, 0)
        next_index[step] = first + num
        work[group] = [seconds.get((step, index), mean) for index in range(first, first + num)]
    return work
