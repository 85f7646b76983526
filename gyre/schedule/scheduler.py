"""The scheduler: `handle(event, now) -> commands`. One deterministic machine; its policy says when cells switch.

Each event is first written into the books (cells, rollouts, batches), then the decisions are taken in a fixed
order: close the step, dispatch, admit, let a cell return, let a cell leave, finish. Handling is a function of
the events so far, so replaying a journal gives the same commands. Steps and versions coincide:
step `s` starts from version `s` and publishes `s + 1`. Cells leave one at a time: the next one only when all
before it train, so the members of a step are always a prefix of the cells. Nothing here knows how a command is
carried out.
"""

from dataclasses import dataclass
from typing import assert_never

from gyre.schedule.batches import Batch, BatchBook
from gyre.schedule.cells import ON_THE_WAY, Cell, CellState
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
)
from gyre.schedule.events import (
    CellDrained,
    CellJoined,
    CellLost,
    CellReleased,
    CellServing,
    DispatchHeld,
    DispatchReleased,
    Evaluate,
    Event,
    GroupReady,
    MicroStepClaimed,
    MicroStepDone,
    RolloutStarted,
    RolloutTerminated,
    StepPublished,
    Tick,
)
from gyre.schedule.pace import Pace
from gyre.schedule.policies import policy_of
from gyre.schedule.policy import SchedulerSettings, dispatch_bound
from gyre.schedule.rollouts import RolloutBook
from gyre.schedule.snapshot import ScheduleSnapshot, snapshot_of
from gyre.schedule.view import view_of
from gyre.types import RolloutId


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where an earlier run stood: `version` steps are published. Later groups are dispatched again."""

    version: int


class Scheduler:
    """The one that decides. Not thread-safe; every fault of its input is an AssertionError or TransitionError."""

    def __init__(self, settings: SchedulerSettings, state: ResumePoint | None = None) -> None:
        self.settings = settings
        self.version = state.version if state else 0
        self.groups_dispatched = self.version * settings.groups_per_batch
        self.is_closed = False
        """The current step is closed and its publication awaited."""
        self.is_held, self.is_finished, self.is_aborted = settings.is_held, False, False
        self.cells = tuple(Cell(index) for index in range(settings.num_cells))
        self.rollouts = RolloutBook(num_cells=settings.num_cells, capacity=settings.cell_capacity)
        self.batches = BatchBook(groups_per_batch=settings.groups_per_batch)
        self.pace = Pace()
        self.staying: set[int] = set()
        """Cells that go on to the current step and wait for their turn to join it."""
        self._policy = policy_of(settings)

    @property
    def batch(self) -> Batch | None:
        """The batch of the current step; None after the last."""
        return self.batches.batch(self.version) if self.version < self.settings.steps else None

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event in; returns what shall be done, in this order. After an Abort nothing is done any more.

        Raises TransitionError for what a cell cannot do in its state, AssertionError for an event that
        contradicts the earlier ones.
        """
        if self.is_aborted:
            return []
        commands = self._record(event, now)
        if not self.is_aborted:
            commands += self._close_step(now)
            commands += self._dispatch(now)
            commands += self._admit(now)
            commands += self._let_last_member_return(now)
            commands += self._let_next_cell_leave(now)
            commands += self._finish()
        return commands

    def _record(self, event: Event, now: float) -> list[Command]:
        """Write the event into the books; returns what follows from it by itself."""
        match event:
            case CellServing() | CellDrained() | CellReleased() | CellJoined() | CellLost():
                return self._record_cell(event, now)
            case RolloutStarted(rollout=rollout):
                self.rollouts.start(rollout)
            case RolloutTerminated(rollout=rollout):
                self._record_end(rollout, now)
            case Evaluate(rollouts=rollouts):
                self.rollouts.dispatch(rollouts)
            case GroupReady(group=group, num_micro_steps=num_micro_steps):
                self._record_group(group, num_micro_steps)
            case MicroStepClaimed(cell=cell, step=step, index=index):
                self.cells[cell].go(MicroStepClaimed, now)
                self._open_batch(step).claim(index, cell)
                self.pace.claimed(cell, now)
            case MicroStepDone(cell=cell, step=step, index=index):
                self.cells[cell].go(MicroStepDone, now)
                self._open_batch(step).finish(index, cell)
                self.pace.done(cell, now)
            case StepPublished(step=step, version=version):
                return self._publish(step, version, now)
            case DispatchHeld():
                self.is_held = True
            case DispatchReleased():
                self.is_held = False
            case Tick():
                pass
            case _:
                assert_never(event)
        return []

    def _record_cell(
        self, event: CellServing | CellDrained | CellReleased | CellJoined | CellLost, now: float
    ) -> list[Command]:
        """A cell reports where it is."""
        cell = self.cells[event.cell]
        if isinstance(event, CellServing):
            assert event.version == self.version, f"{event} serves, published is version {self.version}"
        if isinstance(event, CellJoined) and not cell.late:
            assert event.step == self.version, f"{event} joined, the current step is {self.version}"
        was_draining = cell.is_still_draining
        is_in_time = cell.go(type(event), now)
        match event:
            case CellLost(reason=reason):
                self.is_aborted = True
                return [Abort(reason=f"cell {cell.index} is lost: {reason}")]
            case CellDrained() if is_in_time:
                return [JoinStep(cell=cell.index, step=self.version, version=self.version)]
            case CellDrained() if was_draining and not self.is_closed:
                # Its step was published while it drained: only now nothing is in flight, so it may load.
                return [self._return_to_rollout(cell, now)]
            case CellServing() if self._policy.is_rebalancing:
                return self._spread()
        return []

    def _record_end(self, rollout: RolloutId, now: float) -> None:
        group = rollout.partition(".")[0]
        forecast = self.settings.forecast
        if group.isdecimal() and forecast.group_s and (age := self.rollouts.age(rollout, now)) is not None:
            self.pace.stretch.add(age / max(forecast.of(int(group)), 1.0))
        self.rollouts.terminate(rollout)

    def _record_group(self, group: int, num_micro_steps: int) -> None:
        assert 0 <= group < self.groups_dispatched, f"group {group} is ready, {self.groups_dispatched} are dispatched"
        batch = self.batches.batch_of_group(group)
        assert batch.step >= self.version, f"group {group} is ready, its step {batch.step} is over"
        unfinished = [rollout for rollout in self.members_of(group) if self.rollouts.is_live(rollout)]
        assert not unfinished, f"group {group} is ready, yet {unfinished} have not terminated"
        batch.add_group(group, num_micro_steps)
        self.pace.per_group.add(num_micro_steps)

    def _open_batch(self, step: int) -> Batch:
        batch = self.batch
        assert batch is not None and step == batch.step and not self.is_closed, (
            f"micro-step of step {step}; current is {self.version}, closed: {self.is_closed}"
        )
        return batch

    def members_of(self, group: int) -> list[RolloutId]:
        """The rollouts of a group."""
        return [f"{group}.{member}" for member in range(self.settings.rollouts_per_group)]

    # --- the end of a step --------------------------------------------------------------------------

    def _close_step(self, now: float) -> list[Command]:
        """Close the batch when every micro-step is done and the core is there to apply it.

        It waits for cells that are still loading: applying the step replaces the weights that they read.
        """
        batch = self.batch
        if batch is None or self.is_closed or not batch.is_done or self.cells[0].state is not CellState.TRAINING:
            return []
        if any(cell.state is CellState.LOADING for cell in self.cells):
            return []
        members = sum(cell.state is CellState.TRAINING for cell in self.cells)
        for cell in self.cells:
            if cell.state is CellState.TRAINING or cell.state in ON_THE_WAY:
                cell.go(CloseStep, now)
        self.is_closed = True
        return [CloseStep(step=self.version, members=members)]

    def _publish(self, step: int, version: int, now: float) -> list[Command]:
        """The new version is exposed: whoever trained returns or (the core) goes on, whoever served loads it."""
        assert self.is_closed and step == self.version, f"step {step} published, {self.version} is current"
        assert version == step + 1, f"step {step} published as version {version}"
        self.batches.drop(step)
        self.version, self.is_closed = version, False
        commands: list[Command] = []
        self.staying, num_staying = set(), 0
        for cell in self.cells:
            if cell.state is CellState.SERVING:
                cell.go(LoadWeights, now)
                commands.append(LoadWeights(cell=cell.index, version=version))
            elif cell.index == num_staying and self._should_stay(cell, now):
                num_staying += 1
                if cell.index == 0:
                    cell.go(JoinStep, now)
                    commands.append(JoinStep(cell=0, step=version, version=version))
                else:
                    self.staying.add(cell.index)
            elif not cell.is_still_draining:
                commands.append(self._return_to_rollout(cell, now))
        return commands

    def _should_stay(self, cell: Cell, now: float) -> bool:
        """Whether the policy keeps the cell for the next step. One that was refused is never kept."""
        batch = self.batch
        return batch is not None and not cell.late and self._policy.should_stay(cell.index, view_of(self, batch, now))

    def _return_to_rollout(self, cell: Cell, now: float) -> Command:
        cell.go(ReturnToRollout, now)
        return ReturnToRollout(cell=cell.index, version=self.version)

    # --- decisions ------------------------------------------------------------------------------------

    @property
    def serving(self) -> list[int]:
        """The cells that serve, in order."""
        return [cell.index for cell in self.cells if cell.state is CellState.SERVING]

    @property
    def open_cells(self) -> list[int]:
        """The serving cells that the policy lets take rollouts."""
        return [cell for cell in self.serving if self._policy.may_serve(cell)]

    def _dispatch(self, now: float) -> list[Command]:
        """Every group that the staleness bound allows, once a cell serves the current version."""
        first, end = self.groups_dispatched, dispatch_bound(self.settings, self.version)
        batch = self.batch
        if self.is_held or batch is None or first >= end or not self.open_cells:
            return []
        if not self._policy.may_dispatch(view_of(self, batch, now)):
            return []
        groups = self._policy.order(range(first, end))
        for group in groups:
            self.rollouts.dispatch(self.members_of(group))
        self.groups_dispatched = end
        return [Dispatch(group=group) for group in groups]

    def _admit(self, now: float) -> list[Command]:
        if not self.rollouts.waiting:
            return []
        admitted = self.rollouts.admit_waiting(self.open_cells, now)
        return [Admit(rollout=rollout, cell=cell) for rollout, cell in admitted]

    def _spread(self) -> list[Command]:
        """Even the loads out once nobody loads any more."""
        if any(cell.state is CellState.LOADING for cell in self.cells):
            return []
        moves = self.rollouts.spread(self.open_cells)
        return [Move(rollout=rollout, source=source, destination=to) for rollout, source, to in moves]

    def _let_last_member_return(self, now: float) -> list[Command]:
        """Send the last member of the prefix back in the middle of the step, if the policy says so."""
        batch = self.batch
        members = sum(cell.state is CellState.TRAINING for cell in self.cells)
        if batch is None or not members or self.is_closed or self.staying:
            return []
        if any(cell.state in ON_THE_WAY for cell in self.cells):
            return []
        if batch.is_working(members - 1) or not self._policy.should_return(view_of(self, batch, now)):
            return []
        return [self._return_to_rollout(self.cells[members - 1], now)]

    def _let_next_cell_leave(self, now: float) -> list[Command]:
        """Drain the next cell of the prefix, if the policy says so."""
        cell = next((cell for cell in self.cells if cell.state is not CellState.TRAINING), None)
        batch = self.batch
        if cell is not None and cell.index in self.staying and not self.is_closed:
            self.staying.remove(cell.index)
            cell.go(JoinStep, now)
            return [JoinStep(cell=cell.index, step=self.version, version=self.version)]
        if cell is None or cell.state is not CellState.SERVING or batch is None:
            return []
        if not self._policy.should_leave(view_of(self, batch, now)):
            return []
        cell.go(Drain, now)
        # Those that stay longest first; a loading cell only when no serving one has room.
        loading = [one.index for one in self.cells if one.state is CellState.LOADING]
        destinations = [one for one in reversed(self.serving) if one != cell.index] + loading[::-1]
        moves: list[Command] = [
            Move(rollout=rollout, source=cell.index, destination=destination)
            for rollout, destination in self.rollouts.empty_cell(cell.index, destinations)
        ]
        return [*moves, Drain(cell=cell.index)]

    def _finish(self) -> list[Command]:
        is_over = self.version >= self.settings.steps and len(self.serving) == len(self.cells)
        if self.is_finished or self.is_held or not is_over:
            return []
        self.is_finished = True
        return [Finish()]

    # --- what it shows --------------------------------------------------------------------------------

    def snapshot(self) -> ScheduleSnapshot:
        """The schedule now, as frozen numbers."""
        return snapshot_of(self)
