"""The control thread of a rank: it hears the front while the main thread serves, trains or switches.

Model calls go straight to the engine; role epochs are agreed here by a collective of the leaders, so a long
micro-step never delays them; everything else becomes an order for the main thread, in order of arrival. Only
this thread uses the control group.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gyre.errors import GyreError
from gyre.types import Duty
from gyre.wire.link import ThreadPeer
from gyre.wire.messages import (
    AbortGenerate,
    AgreeRoles,
    ClaimLater,
    Generate,
    Heartbeat,
    MicroStepWork,
    RankFailed,
    StepClosed,
    Stop,
    TakeWeights,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    """This cell's duty from an agreed epoch on: join `step` with `version`, or serve `version`."""

    duty: Duty
    epoch: int
    step: int
    version: int
    weights: bytes
    fingerprint: str


Order = RoleChange | TakeWeights | MicroStepWork | ClaimLater | StepClosed | Stop


class Phase:
    """What the main thread does now and since when, for heartbeats and errors."""

    def __init__(self, name: str) -> None:
        self._name, self._since = name, time.monotonic()

    def enter(self, name: str) -> None:
        """A new phase begins."""
        self._name, self._since = name, time.monotonic()

    def read(self) -> tuple[str, float]:
        """(name, seconds in it)."""
        return self._name, time.monotonic() - self._since


class Pulse:
    """Tells the front once a second what the main thread does, on a thread of its own that nothing else delays."""

    def __init__(self, *, peer: ThreadPeer, rank: int, phase: Phase) -> None:
        self._peer, self._rank, self._phase = peer, rank, phase
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="pulse", daemon=True).start()

    def close(self) -> None:
        """Send no more."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(1.0):
            doing, since_s = self._phase.read()
            self._peer.send(Heartbeat(source=f"rank/{self._rank}", doing=doing, since_s=since_s))


class ControlThread:
    """Owns `peer.inbox`. `agree` is the collective of the leaders; a follower rank passes None.

    `on_generate` and `on_abort` are the engine's entrances (thread-safe, never blocking).
    """

    def __init__(
        self,
        *,
        peer: ThreadPeer,
        rank: int,
        cell: int,
        agree: Callable[[int, list[str]], list[str]] | None,
        on_generate: Callable[[Generate], None],
        on_abort: Callable[[str], None],
    ) -> None:
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._peer, self._rank, self._cell = peer, rank, cell
        self._agree, self._on_generate, self._on_abort = agree, on_generate, on_abort
        self._agreed: tuple[Duty, int] = (Duty.ROLLOUT, -1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    message = self._peer.inbox.get(timeout=1.0)
                except queue.Empty:
                    continue
                if message is None:
                    self.orders.put(Stop(reason="the front is silent"))
                    continue
                self._handle(message)
        except GyreError as error:
            log.error("control rank=%d error=%s", self._rank, error)
            self._peer.send(RankFailed(rank=self._rank, reason=str(error)))
            self.orders.put(Stop(reason=str(error)))

    def _handle(self, message: object) -> None:
        match message:
            case Generate():
                self._on_generate(message)
            case AbortGenerate():
                self._on_abort(message.call)
            case AgreeRoles():
                self._agree_roles(message)
            case TakeWeights() | MicroStepWork() | ClaimLater() | StepClosed() | Stop():
                self.orders.put(message)
            case Heartbeat():
                pass
            case _:
                log.warning("control rank=%d unexpected=%s", self._rank, type(message).__name__)

    def _agree_roles(self, message: AgreeRoles) -> None:
        assert self._agree is not None, "only leaders agree roles"
        duties = self._agree(message.epoch, message.duties)
        duty = Duty(duties[self._cell])
        mine = (duty, message.step if duty is Duty.TRAINING else 0)
        if mine == self._agreed or (duty is Duty.ROLLOUT and self._agreed[0] is Duty.ROLLOUT):
            return
        self._agreed = mine
        self.orders.put(
            RoleChange(
                duty=duty,
                epoch=message.epoch,
                step=message.step,
                version=message.version,
                weights=message.weights,
                fingerprint=message.fingerprint,
            )
        )
