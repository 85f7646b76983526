"""Routes of live model calls: which cell samples a rollout's turn, and what happens to it when that changes.

A turn is forwarded to the cell its rollout is routed to, as soon as that cell is open (its engine holds the
current version). When a route changes or a cell closes, the request in flight is aborted at the source, what
it sampled so far is kept, and the rest is sampled at the destination as a continuation of prompt + partial.
The harness sees one slow answer. Nothing here waits or does I/O: messages leave through `send`, finished
turns through `on_done`, an emptied cell through `on_idle`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from gyre.errors import EngineError
from gyre.types import FinishReason, Float32, Int32, RolloutId, Sample, VersionSpan
from gyre.wire.messages import (
    AbortGenerate,
    Generate,
    Generated,
    Message,
    floats_from_bytes,
    ids_from_bytes,
    ids_to_bytes,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Turn:
    """One model call on its way: its prompt, what has been sampled so far, and where it is now."""

    call: str
    rollout: RolloutId
    prompt: Int32
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_tokens: tuple[int, ...]
    pieces: list[Sample] = field(default_factory=list)
    cell: int | None = None
    attempt: int = 0
    moved: int = 0
    failures: int = 0
    is_abandoned: bool = False
    waited_s: float = 0.0
    parked_at: float = 0.0

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far."""
        return sum(len(piece.tokens) for piece in self.pieces)

    def joined(self) -> Sample:
        """All pieces as one uninterrupted sample."""
        spans, start = [], 0
        for piece in self.pieces:
            spans += [VersionSpan(start=start + s.start, end=start + s.end, version=s.version) for s in piece.spans]
            start += len(piece.tokens)
        return Sample(
            tokens=np.concatenate([piece.tokens for piece in self.pieces]).astype(np.int32),
            logprobs=np.concatenate([piece.logprobs for piece in self.pieces]).astype(np.float32),
            spans=tuple(spans),
            finish=self.pieces[-1].finish,
            cached_tokens=self.pieces[0].cached_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedTurn:
    """A live request went on elsewhere with `tokens_kept` tokens of the same turn already sampled."""

    call: str
    rollout: RolloutId
    source: int
    destination: int
    tokens_kept: int


class Router:
    """Routes by rollout. `send(cell, message)` reaches a cell's leader."""

    def __init__(
        self,
        *,
        send: Callable[[int, Message], None],
        on_done: Callable[[Turn, Sample], None],
        on_failed: Callable[[Turn, str], None],
        on_idle: Callable[[int], None],
        on_moved: Callable[[MovedTurn], None],
        max_failures: int = 3,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._send, self._on_done, self._on_failed = send, on_done, on_failed
        self._on_idle, self._on_moved, self._max_failures, self._clock = on_idle, on_moved, max_failures, clock
        self._route: dict[RolloutId, int] = {}
        self._open: dict[int, int] = {}
        self._closing: set[int] = set()
        self._turns: dict[str, Turn] = {}
        self._parked: dict[str, Turn] = {}

    def open_cell(self, cell: int, version: int) -> None:
        """The cell serves `version`: forward what waits for it."""
        self._open[cell] = version
        self._closing.discard(cell)
        for turn in [turn for turn in self._parked.values() if self._route.get(turn.rollout) == cell]:
            self._forward(turn)

    def close_cell(self, cell: int) -> None:
        """Forward nothing more to the cell and abort what it runs; `on_idle` follows when it is empty."""
        self._open.pop(cell, None)
        self._closing.add(cell)
        for turn in self._turns.values():
            if turn.cell == cell:
                self._send(cell, AbortGenerate(call=self._wire_call(turn)))
        self._check_idle(cell)

    def admit(self, rollout: RolloutId, cell: int) -> None:
        """Route a new rollout."""
        self._route[rollout] = cell

    def move(self, rollout: RolloutId, destination: int) -> None:
        """Change a live rollout's route; its turn, if any, continues there."""
        self._route[rollout] = destination
        for turn in self._turns.values():
            if turn.rollout == rollout and turn.cell is not None and turn.cell != destination:
                self._send(turn.cell, AbortGenerate(call=self._wire_call(turn)))
        for turn in [turn for turn in self._parked.values() if turn.rollout == rollout]:
            if destination in self._open:
                self._forward(turn)

    def forget(self, rollout: RolloutId) -> None:
        """The rollout is over: drop its route and abandon its turns without an answer."""
        self._route.pop(rollout, None)
        for call in [call for call, turn in self._parked.items() if turn.rollout == rollout]:
            del self._parked[call]
        for turn in [turn for turn in self._turns.values() if turn.rollout == rollout]:
            self.cancel(turn.call)

    def cancel(self, call: str) -> None:
        """Stop sampling a turn; nobody is answered. It counts as running until its engine says that it is not."""
        self._parked.pop(call, None)
        turn = self._turns.get(call)
        if turn is not None and turn.cell is not None:
            turn.is_abandoned = True
            self._send(turn.cell, AbortGenerate(call=self._wire_call(turn)))

    def submit(self, turn: Turn) -> None:
        """Sample a turn wherever its rollout is routed, now or as soon as that cell opens."""
        self._forward(turn) if self._route.get(turn.rollout) in self._open else self._park(turn)

    def running(self, cell: int) -> int:
        """Requests in flight at the cell."""
        return sum(turn.cell == cell for turn in self._turns.values())

    @property
    def num_waiting(self) -> int:
        """Turns that wait for a cell to open."""
        return len(self._parked)

    def receive(self, answer: Generated) -> None:
        """An engine's answer: finish the turn, or continue it elsewhere if it was cut."""
        call, _, attempt = answer.call.rpartition("#")
        turn = self._turns.get(call)
        if turn is None or str(turn.attempt) != attempt:
            return  # Cancelled, or an answer that crossed its own abort.
        source = turn.cell
        del self._turns[call]
        turn.cell = None
        if turn.is_abandoned:
            pass
        elif answer.error:
            self._retry(turn, answer.error)
        else:
            turn.pieces.append(_sample_of(answer))
            self._finish_or_continue(turn, source)
        if source is not None:
            self._check_idle(source)

    def _finish_or_continue(self, turn: Turn, source: int | None) -> None:
        last = turn.pieces[-1]
        if last.finish is not FinishReason.ABORT:
            self._on_done(turn, turn.joined())
            return
        if turn.num_sampled >= turn.max_new_tokens:
            # Aborted exactly at its last token: nothing is left to sample.
            turn.pieces[-1] = _with_finish(last, FinishReason.LENGTH)
            self._on_done(turn, turn.joined())
            return
        destination = self._route.get(turn.rollout)
        if destination is None:
            return
        if destination != source and source is not None:
            turn.moved += 1
            self._on_moved(
                MovedTurn(
                    call=turn.call, rollout=turn.rollout, source=source, destination=destination,
                    tokens_kept=turn.num_sampled,
                )
            )  # fmt: skip
        self.submit(turn)

    def _retry(self, turn: Turn, error: str) -> None:
        turn.failures += 1
        log.warning("turn=%s failed=%d error=%s", turn.call, turn.failures, error)
        if turn.failures >= self._max_failures:
            self._on_failed(turn, error)
        else:
            self.submit(turn)

    def _park(self, turn: Turn) -> None:
        if turn.call not in self._parked:
            turn.parked_at = self._clock()
        self._parked[turn.call] = turn

    def _forward(self, turn: Turn) -> None:
        cell = self._route[turn.rollout]
        if self._parked.pop(turn.call, None) is not None:
            turn.waited_s += self._clock() - turn.parked_at
        turn.cell, turn.attempt = cell, turn.attempt + 1
        self._turns[turn.call] = turn
        prompt = np.concatenate([turn.prompt, *(piece.tokens for piece in turn.pieces)]).astype(np.int32)
        self._send(
            cell,
            Generate(
                call=self._wire_call(turn),
                prompt=ids_to_bytes(prompt),
                max_new_tokens=turn.max_new_tokens - turn.num_sampled,
                temperature=turn.temperature,
                top_p=turn.top_p,
                seed=turn.seed,
                stop_tokens=list(turn.stop_tokens),
                version=self._open[cell],
            ),
        )

    @staticmethod
    def _wire_call(turn: Turn) -> str:
        return f"{turn.call}#{turn.attempt}"

    def _check_idle(self, cell: int) -> None:
        if cell in self._closing and not self.running(cell):
            self._closing.discard(cell)
            self._on_idle(cell)


def _sample_of(answer: Generated) -> Sample:
    tokens: Int32 = ids_from_bytes(answer.tokens)
    logprobs: Float32 = floats_from_bytes(answer.logprobs)
    if len(tokens) != len(logprobs):
        raise EngineError(f"cell {answer.cell} answered {len(tokens)} tokens with {len(logprobs)} log-probs")
    span = VersionSpan(start=0, end=len(tokens), version=answer.version)
    return Sample(
        tokens=tokens,
        logprobs=logprobs,
        spans=(span,) if len(tokens) else (),
        finish=FinishReason(answer.finish),
        cached_tokens=answer.cached_tokens,
    )


def _with_finish(sample: Sample, finish: FinishReason) -> Sample:
    return Sample(
        tokens=sample.tokens,
        logprobs=sample.logprobs,
        spans=sample.spans,
        finish=finish,
        cached_tokens=sample.cached_tokens,
    )
