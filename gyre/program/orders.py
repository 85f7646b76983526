"""What people may ask of a running run, and how it ends when they do. No I/O: it only decides what follows.

A stop waits for a step that left a checkpoint, so that `--resume` loses nothing. Dispatch is held by the run
itself until the start and the first evaluation are over; a pause never lets it begin earlier.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gyre.store.orders import Order

FINISHED = "finished"
_STOPPED = "stopped as ordered"


def is_orderly(reason: str) -> bool:
    """Whether a run that ended for this reason did what it was asked: its processes end with code 0."""
    return reason == FINISHED or reason.startswith(_STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderHooks:
    """What orders lead to. `hold` and `release` concern dispatch, `end` takes the reason."""

    hold: Callable[[], None]
    release: Callable[[], None]
    take_checkpoint: Callable[[], None]
    end: Callable[[str], None]


class OrderDesk:
    """The orders in force."""

    def __init__(self, hooks: OrderHooks) -> None:
        self._hooks = hooks
        self._is_open = self._is_paused = self._stops = self._wants_checkpoint = False

    def open_dispatch(self) -> None:
        """The run itself is ready to dispatch: it begins unless it is paused."""
        self._is_open = True
        if not self._is_paused:
            self._hooks.release()

    def take(self, order: Order, *, is_training: bool) -> None:
        """Act on an order. `is_training`: steps are being trained (not: starting, evaluating, ending)."""
        match order:
            case Order.PAUSE:
                self._pause()
            case Order.RESUME:
                self._stops = False
                self._resume()
            case Order.CHECKPOINT:
                self._wants_checkpoint = True
                self._hooks.take_checkpoint()
            case Order.STOP if is_training:
                self._stops = True
                self._hooks.take_checkpoint()
                self._resume()  # a batch that is not dispatched would never be whole
            case Order.STOP | Order.STOP_NOW:
                self._hooks.end(_STOPPED)

    def step_trained(self, version: int, checkpoint: str) -> None:
        """A step is applied; `checkpoint` names what it left, "" if nothing."""
        if checkpoint:
            self._wants_checkpoint = False
            if self._stops:
                self._hooks.end(f"{_STOPPED} after step {version}")

    def notes(self) -> tuple[str, ...]:
        """What is in force, for the screen."""
        notes = []
        if self._is_paused:
            notes.append("dispatch is paused")
        if self._stops:
            notes.append("the run stops after this step")
        elif self._wants_checkpoint:
            notes.append("a checkpoint is taken with this step")
        return tuple(notes)

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            if self._is_open:
                self._hooks.hold()

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self._is_open:
                self._hooks.release()
