"""What happens in a run, written to the store and shown on the screen: the one place where both are told."""

from collections.abc import Callable, Sequence

from gyre.program.conductor import Switch
from gyre.program.progress import Progress
from gyre.program.routes import MovedTurn
from gyre.schedule.commands import Command
from gyre.schedule.events import Event, Tick
from gyre.store import records
from gyre.store.orders import Order
from gyre.store.store import RunStore
from gyre.wire.messages import MicroStepFinished, StepApplied


class Chronicle:
    """Writes records and feeds the progress. `clock` is the run's."""

    def __init__(self, *, store: RunStore, progress: Progress, clock: Callable[[], float]) -> None:
        self._store, self._progress, self._clock = store, progress, clock

    def journal(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """A scheduler event and what it commanded. A tick that commands nothing says nothing."""
        if isinstance(event, Tick) and not commands:
            return
        self._store.record(records.schedule_event(now, event))
        for command in commands:
            self._store.record(records.schedule_command(now, command))

    def moved(self, moved: MovedTurn) -> None:
        """A live request goes on in another cell."""
        self._store.record(
            records.LiveRequestMoved(
                rollout=moved.rollout,
                call=moved.call,
                source=moved.source,
                destination=moved.destination,
                tokens_kept=moved.tokens_kept,
                time=self._clock(),
            )
        )
        self._progress.moved += 1

    def switched(self, switch: Switch) -> None:
        """A cell changed its duty."""
        now = self._clock()
        self._store.record(
            records.Switched(cell=switch.cell, to=switch.duty.value, seconds=switch.seconds, step=switch.step, time=now)
        )
        self._progress.switched(switch, now)

    def serving(self, cell: int, version: int) -> None:
        """A cell serves a version."""
        self._store.record(records.CellState(cell=cell, state="serving", version=version, time=self._clock()))

    def order(self, order: Order) -> None:
        """Somebody told the run to do something."""
        self._store.record(records.OrderTaken(order=order.value, time=self._clock()))

    def trouble(self, level: str, text: str) -> None:
        """Something that a person should read."""
        self._store.record(records.Trouble(level=level, text=text, time=self._clock()))
        self._progress.trouble(level, text)

    def micro_step(self, message: MicroStepFinished) -> None:
        """A micro-step is accumulated."""
        self._store.record(
            records.MicroStepTrained(
                step=message.step,
                index=message.index,
                cell=message.cell,
                seconds=message.seconds,
                num_targets=message.num_targets,
                loss=message.loss,
                max_logprob_gap=message.max_logprob_gap,
                mean_logprob_gap=message.mean_logprob_gap,
                clipped_rollouts=message.clipped_rollouts,
                entropy=message.entropy,
                time=self._clock(),
            )
        )
        self._progress.micro_step(message)

    def step(self, message: StepApplied, rewards: Sequence[float], *, staleness: float) -> None:
        """The core applied a step that trained rollouts with these rewards."""
        now = self._clock()
        self._store.record(
            records.StepTrained(
                step=message.step,
                version=message.version,
                reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
                grad_norm=message.grad_norm,
                num_rollouts=len(rewards),
                seconds=message.seconds,
                checkpoint=message.checkpoint,
                clipped=self._progress.clipped_rollouts,
                staleness_mean=staleness,
                time=now,
            )
        )
        self._progress.staleness_mean = staleness
        self._progress.step_applied(message, list(rewards), now)
