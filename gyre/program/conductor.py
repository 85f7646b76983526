"""Carries the scheduler's commands out and brings it the events: the hinge between the pure machine and the run.

Every event and every command goes to the journal before it takes effect. Role changes that one event causes
are agreed in one epoch. Every transition of a cell has a deadline; one that runs out ends the run, named.
Nothing here waits: messages leave through `post`.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gyre.config.schema import Settings
from gyre.program.routes import Router
from gyre.program.steps import StepQueue
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
from gyre.schedule.events import CellDrained, CellJoined, CellReleased, CellServing, Event, StepPublished
from gyre.schedule.scheduler import Scheduler
from gyre.types import Duty
from gyre.wire.messages import (
    AgreeRoles,
    EngineReleased,
    EngineServing,
    EngineStarted,
    Message,
    StepApplied,
    StepJoined,
    TakeWeights,
    WeightsExposed,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One cell changed its duty; `seconds` from the order to readiness."""

    cell: int
    duty: Duty
    step: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the conductor needs of the rest of the front. `post(cell, message)` reaches a cell's leader."""

    post: Callable[[int, Message], None]
    journal: Callable[[float, Event, list[Command]], None]
    dispatch: Callable[[int], None]
    admit: Callable[[str, int], None]
    switched: Callable[[Switch], None]
    finished: Callable[[], None]
    aborted: Callable[[str], None]
    clock: Callable[[], float]


class Conductor:
    """`feed` an event, `pump(now)` until quiet."""

    def __init__(
        self, *, settings: Settings, scheduler: Scheduler, router: Router, queue: StepQueue, hooks: Hooks
    ) -> None:
        self._settings, self.scheduler, self._router, self._queue, self._hooks = (
            settings, scheduler, router, queue, hooks,
        )  # fmt: skip
        self._events: deque[Event] = deque()
        self._num_cells = settings.placement.num_cells
        self.duties = [Duty.ROLLOUT] * self._num_cells
        self._epoch, self._step = 0, 0
        self._weights: WeightsExposed | None = None
        self._started: set[int] = set()
        self._taking: set[int] = set()
        self._since: dict[int, float] = {}
        self._deadlines: dict[str, tuple[float, float]] = {}

    @property
    def _now(self) -> float:
        return self._hooks.clock()

    @property
    def version(self) -> int:
        """The newest published policy version, -1 before the first."""
        return -1 if self._weights is None else self._weights.version

    def feed(self, event: Event) -> None:
        """Queue an event for the next pump."""
        self._events.append(event)

    def pump(self, now: float) -> None:
        """Handle all queued events and those their commands cause at once."""
        while self._events:
            event = self._events.popleft()
            commands = self.scheduler.handle(event, now)
            self._hooks.journal(now, event, commands)
            duties = list(self.duties)
            is_agreement_due = False
            for command in commands:
                is_agreement_due |= self._perform(command)
            if is_agreement_due or duties != self.duties:
                self._agree()
        self._queue.wake(now)

    def overdue(self, now: float) -> str | None:
        """The name of a wait that ran out, if any."""
        for name, (until, seconds) in self._deadlines.items():
            if now > until:
                return f"{name} did not end within {seconds:g} s"
        return None

    # --- what the leaders report ------------------------------------------------------------------

    def engine_started(self, message: EngineStarted) -> None:
        """A cell's engine is up: give it the version that the core exposes."""
        self._started.add(message.cell)
        self._give_first_weights()

    def weights_exposed(self, message: WeightsExposed) -> None:
        """The core's first weights."""
        self._weights = message
        self._give_first_weights()

    def _give_first_weights(self) -> None:
        if self._weights is None:
            return
        for cell in sorted(self._started):
            self._take_weights(cell)
        self._started.clear()

    def engine_serving(self, message: EngineServing) -> None:
        """Open the cell to traffic if version and fingerprint are the published ones."""
        self._met(f"cell {message.cell} serving")
        assert self._weights is not None
        if (message.version, message.fingerprint) != (self._weights.version, self._weights.fingerprint):
            self._hooks.aborted(f"cell {message.cell} serves version {message.version} {message.fingerprint}")
            return
        if message.cell in self._since:
            seconds = self._now - self._since.pop(message.cell)
            self._hooks.switched(Switch(cell=message.cell, duty=Duty.ROLLOUT, step=self._step, seconds=seconds))
        self._router.open_cell(message.cell, message.version)
        self.feed(CellServing(cell=message.cell, version=message.version))

    def engine_released(self, message: EngineReleased) -> None:
        """The cell's engine is out of the way."""
        self._met(f"cell {message.cell} released")
        self.feed(CellReleased(cell=message.cell))

    def step_joined(self, message: StepJoined) -> None:
        """The cell may claim work."""
        self._met(f"cell {message.cell} joined")
        if message.cell in self._since:
            seconds = self._now - self._since.pop(message.cell)
            self._hooks.switched(Switch(cell=message.cell, duty=Duty.TRAINING, step=message.step, seconds=seconds))
        self.feed(CellJoined(cell=message.cell, step=message.step))

    def step_applied(self, message: StepApplied) -> None:
        """The core's new weights are the published ones from now on."""
        self._met("step applied")
        self._weights = WeightsExposed(
            version=message.version, weights=message.weights, fingerprint=message.fingerprint
        )
        self.feed(StepPublished(step=message.step, version=message.version))

    def cell_idle(self, cell: int) -> None:
        """The router emptied a closed cell."""
        if cell in self._taking:
            self._taking.discard(cell)
            self._take_weights(cell)
        else:
            self._met(f"cell {cell} drained")
            self.feed(CellDrained(cell=cell))

    # --- commands ---------------------------------------------------------------------------------

    def _perform(self, command: Command) -> bool:
        """Carry one command out; True if the leaders have to agree an epoch for it."""
        match command:
            case Dispatch(group=group):
                self._hooks.dispatch(group)
            case Admit(rollout=rollout, cell=cell):
                self._router.admit(rollout, cell)
                self._hooks.admit(rollout, cell)
            case Move(rollout=rollout, destination=destination):
                self._router.move(rollout, destination)
            case Drain(cell=cell):
                self._since[cell] = self._now
                self._expect(f"cell {cell} drained", self._settings.engine.release_timeout_s)
                self._router.close_cell(cell)
            case JoinStep(cell=cell, step=step):
                self.duties[cell], self._step = Duty.TRAINING, step
                self._expect(f"cell {cell} joined", self._settings.engine.load_timeout_s * 2)
                return True
            case CloseStep(step=step, members=members):
                self._expect("step applied", self._settings.placement.data_timeout_s)
                self._queue.close(step, members=members, now=self._now)
            case ReturnToRollout(cell=cell):
                if self.duties[cell] is Duty.ROLLOUT:
                    # It drained too late to join: its engine is still up, idle, and only needs the new version.
                    self._since.pop(cell, None)
                    self._take_weights(cell)
                    return False
                self.duties[cell] = Duty.ROLLOUT
                self._since[cell] = self._now
                self._expect(f"cell {cell} serving", self._settings.engine.load_timeout_s * 2)
                return True
            case LoadWeights(cell=cell):
                self._taking.add(cell)
                self._router.close_cell(cell)
            case Finish():
                self._hooks.finished()
            case Abort(reason=reason):
                self._hooks.aborted(reason)
        return False

    def _agree(self) -> None:
        assert self._weights is not None
        self._epoch += 1
        message = AgreeRoles(
            epoch=self._epoch,
            duties=[duty.value for duty in self.duties],
            step=self._step,
            version=self._weights.version,
            weights=self._weights.weights,
            fingerprint=self._weights.fingerprint,
        )
        for cell in range(self._num_cells):
            self._hooks.post(cell, message)

    def _take_weights(self, cell: int) -> None:
        assert self._weights is not None
        self._expect(f"cell {cell} serving", self._settings.engine.load_timeout_s)
        self._hooks.post(
            cell,
            TakeWeights(
                cell=cell,
                version=self._weights.version,
                weights=self._weights.weights,
                fingerprint=self._weights.fingerprint,
            ),
        )

    def _expect(self, name: str, seconds: float) -> None:
        self._deadlines[name] = (self._now + seconds, seconds)

    def _met(self, name: str) -> None:
        self._deadlines.pop(name, None)
