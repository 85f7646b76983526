"""The main thread of a cell's leader: serve, switch, train, as the agreed epochs say.

Its engine answers model calls on threads of its own; this thread only changes what the engine is. Every
transition is reported with its seconds, is checked rather than believed (idle, fingerprint, a one-token
probe), and has a deadline.
"""

import logging
import queue
import time

from torch import Tensor

from gyre.config.schema import Settings
from gyre.errors import EngineError
from gyre.fabric.weights import WeightShelf, fingerprint_of, pull_weights
from gyre.program.control import ControlThread, Phase, RoleChange
from gyre.program.training import CellRelay, Idle, Join, Quit, TrainingCell
from gyre.serve.engine import Engine
from gyre.serve.request import GenerateRequest
from gyre.types import Duty, Sample
from gyre.wire.link import ThreadPeer
from gyre.wire.messages import (
    Claim,
    ClaimLater,
    EngineReleased,
    EngineServing,
    Generate,
    Generated,
    MicroStepFinished,
    MicroStepWork,
    StepApplied,
    StepClosed,
    StepJoined,
    Stop,
    TakeWeights,
    WeightsExposed,
    floats_to_bytes,
    ids_from_bytes,
    ids_to_bytes,
)

log = logging.getLogger(__name__)


class ModelCalls:
    """The engine's entrance for model calls; used by the control thread, answered from the engine's loop."""

    def __init__(self, *, engine: Engine, peer: ThreadPeer, cell: int) -> None:
        self._engine, self._peer, self._cell = engine, peer, cell

    def generate(self, message: Generate) -> None:
        """Start sampling, or answer at once why not."""
        if message.version != self._engine.version:
            self._answer(message.call, message.version, EngineError(f"engine holds version {self._engine.version}"))
            return
        request = GenerateRequest(
            call=message.call,
            prompt=ids_from_bytes(message.prompt),
            max_new_tokens=message.max_new_tokens,
            temperature=message.temperature,
            top_p=message.top_p,
            seed=message.seed,
            stop_tokens=tuple(message.stop_tokens),
            version=message.version,
        )
        self._engine.submit(request, lambda call, outcome: self._answer(call, message.version, outcome))

    def abort(self, call: str) -> None:
        """Cut a request; its partial answer follows."""
        self._engine.abort(call)

    def _answer(self, call: str, version: int, outcome: Sample | EngineError) -> None:
        if isinstance(outcome, Sample):
            answer = Generated(
                call=call,
                cell=self._cell,
                version=version,
                tokens=ids_to_bytes(outcome.tokens),
                logprobs=floats_to_bytes(outcome.logprobs),
                finish=outcome.finish.value,
                cached_tokens=outcome.cached_tokens,
            )
        else:
            answer = Generated(call=call, cell=self._cell, version=version, error=str(outcome))
        self._peer.send(answer)


class Leader:
    """Acts one cell's duty until told to stop."""

    def __init__(
        self,
        *,
        cell: int,
        settings: Settings,
        peer: ThreadPeer,
        control: ControlThread,
        engine: Engine,
        training: TrainingCell,
        relay: CellRelay,
        shelf: WeightShelf | None,
        phase: Phase,
    ) -> None:
        self._cell, self._settings = cell, settings
        self._peer, self._orders, self._engine = peer, control.orders, engine
        self._training, self._relay, self._shelf, self._phase = training, relay, shelf, phase
        self._is_released = False

    def expose(self, version: int, tensors: list[tuple[str, Tensor]]) -> WeightsExposed:
        """Put the core's weights on the shelf as `version`."""
        assert self._shelf is not None, "only the core exposes weights"
        weights = self._shelf.expose(version, tensors)
        return WeightsExposed(version=version, weights=weights, fingerprint=fingerprint_of(tensors))

    def run(self) -> str:
        """Until Stop; returns its reason."""
        while True:
            self._phase.enter("serving" if not self._is_released else "released")
            order = self._next_order()
            match order:
                case Stop():
                    self._relay.send(Quit())
                    return order.reason
                case TakeWeights():
                    self._take_weights(order)
                case RoleChange(duty=Duty.TRAINING):
                    stop = self._train(order)
                    if stop is not None:
                        return stop
                case RoleChange():
                    self._return_to_rollout(order)
                case MicroStepWork():
                    # Work that was not done would be missing from the gradient.
                    raise EngineError(f"cell {self._cell} got micro-step {order.step}/{order.index} out of training")
                case ClaimLater() | StepClosed():
                    pass  # Crossed the end of a step on the wire.

    def _next_order(self) -> object:
        while True:
            try:
                return self._orders.get(timeout=5.0)
            except queue.Empty:
                self._engine.check()
                self._relay.send(Idle())

    def _take_weights(self, order: TakeWeights) -> None:
        began = time.monotonic()
        self._load(order.version, order.weights, order.fingerprint)
        self._report_serving(order.version, began)

    def _return_to_rollout(self, order: RoleChange) -> None:
        began = time.monotonic()
        if self._is_released:
            self._phase.enter("resuming the engine")
            self._engine.resume(began + self._settings.engine.load_timeout_s)
            self._is_released = False
        self._load(order.version, order.weights, order.fingerprint)
        self._report_serving(order.version, began)

    def _load(self, version: int, weights: bytes, fingerprint: str) -> None:
        self._phase.enter(f"loading version {version}")
        deadline = time.monotonic() + self._settings.engine.load_timeout_s
        self._engine.load_weights(pull_weights(weights, deadline), version, deadline)
        if self._engine.fingerprint != fingerprint:
            raise EngineError(
                f"cell {self._cell} loaded weights {self._engine.fingerprint}, version {version} has {fingerprint}"
            )
        self._engine.probe(deadline)

    def _report_serving(self, version: int, began: float) -> None:
        self._peer.send(
            EngineServing(
                cell=self._cell,
                version=version,
                fingerprint=self._engine.fingerprint or "",
                seconds=time.monotonic() - began,
            )
        )

    def _train(self, order: RoleChange) -> str | None:
        """One step from joining to its close. Returns the reason if told to stop."""
        if not self._is_released:
            self._release()
        self._join(order)
        self._peer.send(Claim(cell=self._cell, step=order.step))
        while True:
            self._phase.enter(f"waiting for work of step {order.step}")
            todo = self._next_order()
            match todo:
                case MicroStepWork(step=order.step):
                    self._micro_step(todo)
                case StepClosed(step=order.step):
                    self._close(todo)
                    return None
                case RoleChange(duty=Duty.ROLLOUT):
                    # It joined too late: the step was closed and published without it.
                    self._return_to_rollout(todo)
                    return None
                case Stop():
                    self._relay.send(Quit())
                    return todo.reason
                case ClaimLater():
                    pass
                case _:
                    raise EngineError(f"cell {self._cell} got {todo!r} while training step {order.step}")
            self._peer.send(Claim(cell=self._cell, step=order.step))

    def _release(self) -> None:
        began = time.monotonic()
        self._phase.enter("releasing the engine")
        freed = self._engine.release(began + self._settings.engine.release_timeout_s)
        self._is_released = True
        self._peer.send(EngineReleased(cell=self._cell, freed_bytes=freed, seconds=time.monotonic() - began))

    def _join(self, order: RoleChange) -> None:
        began = time.monotonic()
        self._phase.enter(f"joining step {order.step}")
        join = Join(step=order.step, version=order.version, weights=order.weights)
        self._relay.send(join)
        self._training.join(join)
        self._peer.send(
            StepJoined(cell=self._cell, step=order.step, version=order.version, seconds=time.monotonic() - began)
        )

    def _micro_step(self, work: MicroStepWork) -> None:
        self._phase.enter(f"micro-step {work.step}/{work.index}")
        self._relay.send(work)
        stats = self._training.work(work)
        self._peer.send(
            MicroStepFinished(
                cell=self._cell,
                step=work.step,
                index=work.index,
                seconds=stats.seconds,
                num_targets=stats.num_targets,
                loss=stats.loss,
                max_logprob_gap=stats.max_logprob_gap,
                mean_logprob_gap=stats.mean_logprob_gap,
                clipped_rollouts=stats.clipped,
                entropy=stats.entropy,
                ratios=stats.ratios,
            )
        )

    def _close(self, order: StepClosed) -> None:
        began = time.monotonic()
        self._phase.enter(f"closing step {order.step}")
        self._relay.send(order)
        applied = self._training.close(order)
        if applied is None:
            return
        version = order.step + 1
        exposed = self.expose(version, applied.tensors)
        self._peer.send(
            StepApplied(
                step=order.step,
                version=version,
                weights=exposed.weights,
                fingerprint=exposed.fingerprint,
                grad_norm=applied.stats.grad_norm,
                seconds=time.monotonic() - began,
                checkpoint=applied.checkpoint,
            )
        )


def follow(training: TrainingCell, relay: CellRelay) -> None:
    """The main loop of a cell's other ranks: repeat what the leader relays, until it ends."""
    while True:
        order = relay.recv()
        match order:
            case Join():
                training.join(order)
            case MicroStepWork():
                training.work(order)
            case StepClosed():
                training.close(order)
            case Idle():
                pass
            case Quit():
                return
