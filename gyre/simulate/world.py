"""A cluster in virtual time that carries the scheduler's commands out: the scheduler is the one a real run has.

`World(...).run()` is a function of its arguments. Time jumps from one happening to the next: a rollout ends, a
cell has switched or loaded, a micro-step is done, a group is graded, a step is published, a cell is lost. After
a loss everything since the last publication is done again, as after a restart from a checkpoint. The optimizer
stops the core only; weights are pulled by every cell that serves.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from random import Random

from gyre.config.choices import PolicyName
from gyre.schedule.cells import CellState
from gyre.schedule.commands import (
    Abort,
    Admit,
    CloseStep,
    Command,
    Dispatch,
    Drain,
    Finish,
    JoinStep,
    LoadWeights,
    Move,
    ReturnToRollout,
)  # fmt: skip
from gyre.schedule.events import (
    CellDrained,
    CellJoined,
    CellLost,
    CellReleased,
    CellServing,
    Event,
    GroupReady,
    MicroStepClaimed,
    MicroStepDone,
    RolloutStarted,
    RolloutTerminated,
    StepPublished,
    Tick,
)  # fmt: skip
from gyre.schedule.policy import SchedulerSettings
from gyre.schedule.scheduler import ResumePoint, Scheduler
from gyre.simulate.cluster import Cluster
from gyre.simulate.result import Result, Segment
from gyre.simulate.sharing import SharedCell
from gyre.simulate.workload import Workload

TICK_S = 60.0
"""Pause between two ticks for policies that look at the clock."""
TICKING = (PolicyName.JUST_IN_TIME, PolicyName.JUST_IN_TIME_HISTORY)


Journal = Callable[[float, Event, list[Command]], None]


class World:
    """One run of a plan on a cluster with a workload. `journal` is told what a run's journal would be told."""

    def __init__(
        self,
        plan: SchedulerSettings,
        cluster: Cluster,
        workload: Workload,
        *,
        seed: int = 0,
        journal: Journal | None = None,
    ) -> None:
        self._journal = journal
        needed = plan.steps * plan.groups_per_batch
        assert len(workload.groups) >= needed, f"{len(workload.groups)} groups, the plan needs {needed}"
        self._plan, self._cluster, self._workload = plan, cluster, workload
        self._random = Random(f"losses/{seed}")
        speeds = [1.0] + [cluster.slowdown(load) for load in range(1, plan.cell_capacity + 1)]
        self._slowdown = speeds.__getitem__
        self._now, self._num_events, self._sequence = 0.0, 0, 0
        self._moves = self._switches = self._restarts = 0
        self._ends: list[float] = []
        self._segments: list[Segment] = []
        self._levels: list[tuple[float, int]] = []
        self._idle_s = self._slack_s = self._busy_s = 0.0
        self._trained: list[float] = []
        self._start(0)

    def _start(self, version: int) -> None:
        """All cells load; nothing is dispatched."""
        plan = self._plan
        self._scheduler = Scheduler(plan, ResumePoint(version=version))
        self._cells = [SharedCell(self._slowdown) for _ in range(plan.num_cells)]
        for cell in self._cells:
            cell.run(False, self._now)
        self._states = [(CellState.LOADING, self._now)] * plan.num_cells
        self._due: list[tuple[float, int, int, Event]] = []
        self._void = [0] * plan.num_cells
        self._working: list[float | None] = [None] * plan.num_cells
        self._left: dict[int, int] = {}
        self._work: dict[int, list[float]] = {}
        self._is_over = False
        for cell in range(plan.num_cells):
            self._later(0.0, CellServing(cell=cell, version=version), cell)
        if plan.policy in TICKING:
            self._later(TICK_S, Tick())
        hours = self._cluster.cell_loss_hours
        if hours:
            wait_s = self._random.expovariate(plan.num_cells / (hours * 3600.0))
            lost = self._random.randrange(plan.num_cells)
            self._later(wait_s, CellLost(cell=lost, reason="simulated"))

    def run(self) -> Result:
        """Play until Finish. AssertionError if nothing can happen any more."""
        while not self._is_over:
            cell, at, rollout = -1, math.inf, ""
            for index, shared in enumerate(self._cells):
                end, name = shared.next_end()
                if end < at:
                    cell, at, rollout = index, end, name
            if self._due and self._due[0][0] <= at:
                at, sequence, of, event = heapq.heappop(self._due)
                if of >= 0 and sequence <= self._void[of]:
                    continue
            else:
                assert cell >= 0, f"nothing can happen any more: {self._scheduler.snapshot()}"
                event = RolloutTerminated(rollout=rollout)
            self._now = max(at, self._now)
            self._happen(event, cell)
        return self._result()

    def _later(self, seconds: float, event: Event, cell: int = -1) -> None:
        """The event in `seconds`; a report of `cell` is dropped if the cell is sent back before."""
        self._sequence += 1
        heapq.heappush(self._due, (self._now + seconds, self._sequence, cell, event))

    def _happen(self, event: Event, cell: int) -> None:
        match event:
            case CellServing(cell=index):
                self._cells[index].run(True, self._now)
            case RolloutTerminated(rollout=rollout):
                self._cells[cell].take(rollout, self._now)
                self._end(int(rollout.partition(".")[0]))
            case GroupReady(group=group):
                step = group // self._plan.groups_per_batch
                self._work.setdefault(step, []).extend(self._workload.groups[group].micro_steps_s)
            case MicroStepDone(cell=index):
                began = self._working[index]
                assert began is not None, event
                self._busy_s += self._now - began
                self._working[index] = None
            case StepPublished(step=step):
                self._ends.append(self._now)
                self._work.pop(step, None)
                first = step * self._plan.groups_per_batch
                groups = self._workload.groups[first : first + self._plan.groups_per_batch]
                self._trained += [group.mean_s for group in groups]
            case CellLost():
                self._restart()
                return
            case Tick():
                self._later(TICK_S, Tick())
        self._feed(event)
        self._claim()

    def _feed(self, event: Event) -> None:
        """Hand the event over and carry the commands out, and so on for the events that these cause at once."""
        events = deque([event])
        while events:
            self._num_events += 1
            happened = events.popleft()
            commands = self._scheduler.handle(happened, self._now)
            if self._journal is not None:
                self._journal(self._now, happened, commands)
            for command in commands:
                at_once = self._perform(command)
                if at_once is not None:
                    events.append(at_once)
        self._note()

    def _end(self, group: int) -> None:
        self._left[group] -= 1
        if self._left[group] == 0:
            work = self._workload.groups[group]
            num = len(work.micro_steps_s)
            wait_s = self._cluster.grading_s if work.grading_s is None else work.grading_s
            self._later(wait_s, GroupReady(group=group, num_micro_steps=num))

    def _perform(self, command: Command) -> Event | None:
        """Carry one command out; returns what it causes at once."""
        cluster, now = self._cluster, self._now
        match command:
            case Dispatch(group=group):
                self._left[group] = len(self._workload.groups[group].rollouts_s)
            case Admit(rollout=rollout, cell=cell):
                group, _, member = rollout.partition(".")
                self._cells[cell].put(rollout, self._workload.groups[int(group)].rollouts_s[int(member)], now)
                return RolloutStarted(rollout=rollout)
            case Move(rollout=rollout, source=source, destination=destination):
                left = self._cells[source].take(rollout, now)
                self._cells[destination].put(rollout, left + cluster.move_s, now)
                self._moves += 1
            case Drain(cell=cell):
                self._cells[cell].run(False, now)
                self._switches += 1
                return CellDrained(cell=cell)
            case JoinStep(cell=cell, step=step):
                if self._states[cell][0] is CellState.PUBLISHING:
                    self._later(cluster.pull_s if cell else 0.0, CellJoined(cell=cell, step=step), cell)
                else:
                    self._later(cluster.switch_to_training_s / 2, CellReleased(cell=cell), cell)
                    self._later(cluster.switch_to_training_s, CellJoined(cell=cell, step=step), cell)
            case CloseStep(step=step):
                self._later(cluster.optimizer_s, StepPublished(step=step, version=step + 1))
            case ReturnToRollout(cell=cell, version=version):
                # What a refused cell was still doing is over.
                self._void[cell] = self._sequence
                back_s = cluster.switch_to_rollout_s + cluster.pull_s
                self._later(back_s, CellServing(cell=cell, version=version))
                self._switches += 1
            case LoadWeights(cell=cell, version=version):
                self._cells[cell].run(False, now)
                self._later(cluster.pull_s, CellServing(cell=cell, version=version))
            case Finish():
                self._is_over = True
            case Abort(reason=reason):
                raise AssertionError(reason)
        return None

    def _claim(self) -> None:
        """Members without work take ready micro-steps, in order of cells."""
        scheduler, is_streaming = self._scheduler, self._plan.policy.is_streaming
        for cell in scheduler.cells:
            batch = scheduler.batch
            if batch is None or scheduler.is_closed or not batch.num_unclaimed:
                return
            if not is_streaming and not batch.is_complete:
                return
            if cell.state is not CellState.TRAINING or self._working[cell.index] is not None:
                continue
            index = len(batch.claimed)
            seconds = self._work[batch.step][index]
            if not is_streaming:
                seconds *= 1.0 + self._cluster.share_imbalance
            self._working[cell.index] = self._now
            self._feed(MicroStepClaimed(cell=cell.index, step=batch.step, index=index))
            self._later(seconds, MicroStepDone(cell=cell.index, step=batch.step, index=index))

    def _restart(self) -> None:
        """The world starts again from the last published version."""
        self._restarts += 1
        self._close_books()
        self._now += self._cluster.restart_s
        self._start(self._scheduler.version)

    # --- what is written down ---------------------------------------------------------------------

    def _note(self) -> None:
        """Segments of cells that changed their state, and the waterlevel."""
        for cell in self._scheduler.cells:
            state, since = self._states[cell.index]
            if cell.state is not state:
                self._segments.append(Segment(cell=cell.index, state=state, begin_s=since, end_s=self._now))
                self._states[cell.index] = (cell.state, self._now)
        level = self._scheduler.rollouts.waterlevel
        if not self._levels or self._levels[-1][1] != level:
            self._levels.append((self._now, level))

    def _close_books(self) -> None:
        for index, (state, since) in enumerate(self._states):
            self._segments.append(Segment(cell=index, state=state, begin_s=since, end_s=self._now))
            cell = self._cells[index]
            cell.advance(self._now)
            self._idle_s += cell.empty_seconds
            self._slack_s += cell.running_seconds - cell.empty_seconds - cell.load_seconds / self._plan.cell_capacity

    def _result(self) -> Result:
        self._close_books()
        seconds = self._ends[-1] if self._ends else self._now
        total = max(seconds, 1e-9) * self._plan.num_cells
        member_s = sum(one.end_s - one.begin_s for one in self._segments if one.state is CellState.TRAINING)
        between = (CellState.DRAINING, CellState.RELEASED, CellState.JOINING, CellState.LOADING, CellState.PUBLISHING)
        dispatched = [group.mean_s for group in self._workload.groups[: self._scheduler.groups_dispatched]]
        mean = sum(dispatched) / max(len(dispatched), 1)
        return Result(
            seconds=seconds,
            steps=self._plan.steps,
            step_ends_s=tuple(self._ends),
            idle_rollout=self._idle_s / total,
            slack_rollout=self._slack_s / total,
            idle_training=max(member_s - self._busy_s, 0.0) / total,
            training=self._busy_s / total,
            switching=sum(one.end_s - one.begin_s for one in self._segments if one.state in between) / total,
            switches=self._switches,
            moves=self._moves,
            bias=sum(self._trained) / len(self._trained) / mean - 1.0 if self._trained else 0.0,
            restarts=self._restarts,
            events=self._num_events,
            segments=tuple(self._segments),
            levels=tuple(self._levels),
        )
