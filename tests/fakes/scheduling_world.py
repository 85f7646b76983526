"""A small world that carries out the scheduler's commands and answers with events in random order.

It knows nothing of the scheduler's state: it holds cells, harnesses, graders and a queue of micro-steps of its
own, refuses commands that make no sense there, and draws which of the possible events happens next. A run is
a function of its seed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from gyre.schedule.audit import audit
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
    CellReleased,
    CellServing,
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
from gyre.schedule.policy import SchedulerSettings
from gyre.schedule.scheduler import Scheduler


@dataclass(slots=True, kw_only=True)
class FakeCell:
    """Reports come from `reports` in order; `is_answering` while its engine takes traffic."""

    index: int
    reports: list[Event] = field(default_factory=list)
    is_answering: bool = False
    is_released: bool = False
    member_of: int | None = None
    doing: int | None = None


class SchedulingWorld:
    """`run()` until the scheduler finishes; `journal` then holds (event, now, commands)."""

    def __init__(self, settings: SchedulerSettings, *, seed: int, micro_steps: int = 3, evaluations: int = 0) -> None:
        self.settings, self._random = settings, Random(seed)
        self._max_micro_steps, self._evaluations = micro_steps, evaluations
        self.scheduler = Scheduler(settings)
        self.cells = [FakeCell(index=i, reports=[CellServing(cell=i, version=0)]) for i in range(settings.num_cells)]
        self.journal: list[tuple[Event, float, list[Command]]] = []
        self.routes: dict[str, int | None] = {}
        self.started: dict[str, None] = {}
        self.terminated: dict[str, None] = {}
        self.ungraded: list[int] = []
        self.work: dict[int, int] = {}
        self.claims: dict[tuple[int, int], int] = {}
        self.done: dict[tuple[int, int], int] = {}
        self.published: list[int] = []
        self.joins: list[tuple[int, int]] = []
        self.moves = 0
        self.version, self.publishing = 0, False
        self.is_finished = False
        self._now = 0.0

    def run(self, *, limit: int = 20_000) -> None:
        """Play on until Finish and nothing is left to happen; AssertionError if the world gets stuck."""
        if self._evaluations:
            self.feed(Evaluate(rollouts=tuple(f"eval0.{i}" for i in range(self._evaluations))))
            self.routes.update({rollout: self.routes.get(rollout) for rollout in self.eval_ids()})
        if self.settings.is_held:
            self._play(lambda: all(rollout in self.terminated for rollout in self.eval_ids()), limit)
            self.feed(DispatchReleased())
        self._play(lambda: self.is_finished, limit)
        self._play(lambda: not self._possible(), limit)

    def eval_ids(self) -> list[str]:
        return [f"eval0.{i}" for i in range(self._evaluations)]

    def _play(self, is_over: Callable[[], bool], limit: int) -> None:
        for _ in range(limit):
            if is_over():
                return
            possible = self._possible()
            assert possible, f"nothing can happen any more: {self.scheduler.snapshot()}"
            self._happen(self._random.choice(possible))
        raise AssertionError(f"not over after {limit} events: {self.scheduler.snapshot()}")

    def feed(self, event: Event) -> None:
        """Hand the event over, carry the commands out, audit."""
        self._now += self._random.random()
        commands = self.scheduler.handle(event, self._now)
        self.journal.append((event, self._now, commands))
        for command in commands:
            self._perform(command)
        audit(self.scheduler)

    # --- what can happen ----------------------------------------------------------------------------

    def _possible(self) -> list[Event]:
        events: list[Event] = [cell.reports[0] for cell in self.cells if cell.reports]
        for rollout, cell in self.routes.items():
            if rollout not in self.started:
                events.append(RolloutStarted(rollout=rollout))
            elif cell is not None and self.cells[cell].is_answering:
                events.append(RolloutTerminated(rollout=rollout))
        events += [GroupReady(group=group, num_micro_steps=0) for group in self.ungraded if self._is_ended(group)]
        for cell in self.cells:
            step = cell.member_of
            if step is None or self.publishing:
                continue
            if cell.doing is not None:
                events.append(MicroStepDone(cell=cell.index, step=step, index=cell.doing))
            elif self._next_index(step) < self.work.get(step, 0):
                events.append(MicroStepClaimed(cell=cell.index, step=step, index=self._next_index(step)))
        if self.publishing:
            events.append(StepPublished(step=self.version, version=self.version + 1))
        return events

    def _is_ended(self, group: int) -> bool:
        return all(f"{group}.{i}" in self.terminated for i in range(self.settings.rollouts_per_group))

    def _next_index(self, step: int) -> int:
        return sum(of == step for of, _ in self.claims)

    def _happen(self, event: Event) -> None:
        match event:
            case RolloutStarted(rollout=rollout):
                self.started[rollout] = None
            case RolloutTerminated(rollout=rollout):
                del self.routes[rollout]
                self.terminated[rollout] = None
            case GroupReady(group=group):
                self.ungraded.remove(group)
                event = GroupReady(group=group, num_micro_steps=self._random.randint(0, self._max_micro_steps))
                step = group // self.settings.groups_per_batch
                self.work[step] = self.work.get(step, 0) + event.num_micro_steps
            case MicroStepClaimed(cell=cell, step=step, index=index):
                self.claims[step, index] = cell
                self.cells[cell].doing = index
            case MicroStepDone(cell=cell, step=step, index=index):
                assert (step, index) not in self.done
                self.done[step, index] = cell
                self.cells[cell].doing = None
            case StepPublished(version=version):
                self.version, self.publishing = version, False
                self.published.append(version)
            case CellServing() | CellDrained() | CellReleased() | CellJoined():
                self._report(event)
        self.feed(event)
        if self._random.random() < 0.1:
            self.feed(Tick())

    def _report(self, event: CellServing | CellDrained | CellReleased | CellJoined) -> None:
        cell = self.cells[event.cell]
        cell.reports.pop(0)
        match event:
            case CellServing():
                cell.is_answering, cell.is_released = True, False
            case CellReleased():
                cell.is_released = True
            case CellJoined(step=step) if step == self.version and not self.publishing:
                cell.member_of = step
                self.joins.append((step, cell.index))

    # --- commands -------------------------------------------------------------------------------------

    def _perform(self, command: Command) -> None:
        match command:
            case Dispatch(group=group):
                assert any(cell.is_answering for cell in self.cells), f"group {group} dispatched, nobody serves"
                self.ungraded.append(group)
                self.routes.update({f"{group}.{i}": None for i in range(self.settings.rollouts_per_group)})
            case Admit(rollout=rollout, cell=cell):
                assert self.cells[cell].is_answering and self.routes.get(rollout) is None, command
                self.routes[rollout] = cell
            case Move(rollout=rollout, source=source, destination=destination):
                assert self.routes[rollout] == source != destination, (command, self.routes[rollout])
                self.routes[rollout] = destination
                self.moves += 1
            case Drain(cell=cell):
                assert cell not in self.routes.values(), f"cell {cell} drains with routes"
                assert not self.routes or any(one.is_answering for one in self.cells if one.index != cell), command
                self.cells[cell].is_answering = False
                self.cells[cell].reports.append(CellDrained(cell=cell))
            case JoinStep(cell=cell, step=step, version=version):
                assert step == version == self.version, command
                if not self.cells[cell].is_released:
                    self.cells[cell].reports.append(CellReleased(cell=cell))
                self.cells[cell].reports.append(CellJoined(cell=cell, step=step))
            case CloseStep(step=step, members=members):
                assert [cell.index for cell in self.cells if cell.member_of == step] == list(range(members)), command
                assert all(cell.doing is None for cell in self.cells), command
                for cell in self.cells:
                    cell.member_of = None
                self.publishing = True
            case ReturnToRollout(cell=cell, version=version):
                self._load(cell, version)
            case LoadWeights(cell=cell, version=version):
                assert self.cells[cell].is_answering, command
                self._load(cell, version)
            case Finish():
                self.is_finished = True
            case Abort(reason=reason):
                raise AssertionError(reason)

    def _load(self, index: int, version: int) -> None:
        cell = self.cells[index]
        assert version == self.version and not any(isinstance(one, CellDrained) for one in cell.reports), cell
        if self._random.random() < 0.5:
            cell.reports.clear()  # A refused cell may still report what it was doing, or drop it.
        cell.is_answering, cell.member_of = False, None
        cell.reports.append(CellServing(cell=index, version=version))
