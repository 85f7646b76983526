"""The book of rollouts: their states, sessions and scores, and what becomes of a finished group.

dispatched -> running -> ended -> scored | dropped | placeholder. Each state is recorded before the next
begins. Model calls enter here, pass the rollout's session (which owns its tree) and leave as turns for the
router; a finished turn comes back, is recorded, and is answered.
"""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gyre.config.schema import Settings
from gyre.gateway.render import Renderer
from gyre.gateway.session import Answered, Sampling, Session, SessionSettings, Waiting
from gyre.program.curriculum import turn_seed
from gyre.program.harvest import Finished
from gyre.program.routes import Turn
from gyre.store import records
from gyre.types import EndReason, Purpose, RolloutId, Sample
from gyre.wire.messages import (
    AgentEnded,
    AgentStarted,
    Graded,
    Message,
    ModelCall,
    ModelCallGone,
    StartAgent,
    ids_to_bytes,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One rollout on its way."""

    rollout: RolloutId
    purpose: Purpose
    group: int | None
    task: Path
    session: Session
    api_key: str
    state: str = "dispatched"
    since: float = 0.0
    began: float = 0.0
    end: EndReason | None = None
    reward: float | None = None
    turn_began: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutHooks:
    """What the book needs of the front. `to_hands` reaches the node's hands."""

    to_hands: Callable[[Message], None]
    record: Callable[[records.Record], None]
    submit: Callable[[Turn], None]
    forget: Callable[[RolloutId], None]
    started: Callable[[RolloutId], None]
    terminated: Callable[[RolloutId], None]
    settled: Callable[[Rollout], None]
    clock: Callable[[], float]


class RolloutBook:
    """All rollouts of this run that are not yet forgotten."""

    def __init__(self, *, settings: Settings, renderer: Renderer, hooks: RolloutHooks) -> None:
        self._settings, self._renderer, self._hooks = settings, renderer, hooks
        self._rollouts: dict[RolloutId, Rollout] = {}
        self.harness_errors = 0
        self.tokens_sampled = 0

    def get(self, rollout: RolloutId) -> Rollout:
        """The rollout's entry."""
        return self._rollouts[rollout]

    def states(self) -> dict[str, int]:
        """How many rollouts are in which state."""
        counts: dict[str, int] = {}
        for one in self._rollouts.values():
            counts[one.state] = counts.get(one.state, 0) + 1
        return counts

    def longest_running_s(self, now: float) -> float:
        """Age of the oldest running rollout."""
        return max((now - one.began for one in self._rollouts.values() if one.state == "running"), default=0.0)

    def register(self, rollout: RolloutId, *, purpose: Purpose, group: int | None, task: Path) -> None:
        """A rollout is dispatched; its harness starts once it is admitted to a cell."""
        api_key = f"gyre-{secrets.token_urlsafe(18)}"
        session = Session(rollout, self._renderer, self._session_settings(api_key))
        one = Rollout(rollout=rollout, purpose=purpose, group=group, task=task, session=session, api_key=api_key)
        self._rollouts[rollout] = one
        self._enter(one, "dispatched")

    def admit(self, rollout: RolloutId) -> None:
        """The rollout has a route: start its harness, once."""
        one = self._rollouts[rollout]
        if one.state != "dispatched":
            return
        self._enter(one, "admitted")
        self._hooks.to_hands(
            StartAgent(
                rollout=rollout,
                task=str(one.task),
                harness=self._settings.rollout.harness.value,
                api_key=one.api_key,
                model=self._settings.run.name,
            )
        )

    def agent_started(self, message: AgentStarted) -> None:
        """The harness runs."""
        one = self._rollouts[message.rollout]
        one.began = self._hooks.clock()
        self._enter(one, "running")
        self._hooks.started(message.rollout)

    def agent_ended(self, message: AgentEnded) -> None:
        """The harness is gone: no more model calls; grading follows."""
        one = self._rollouts[message.rollout]
        one.end = EndReason(message.end)
        if one.state == "admitted":
            self._hooks.started(message.rollout)
        self._enter(one, "ended", f"{message.end}: {message.detail}" if message.detail else message.end)
        if one.end is EndReason.HARNESS_ERROR:
            self.harness_errors += 1
            self._hooks.record(records.HarnessError(rollout=message.rollout, detail=message.detail, time=one.since))
        self._hooks.forget(message.rollout)
        self._hooks.terminated(message.rollout)

    def graded(self, message: Graded) -> None:
        """The rollout has its score, or is dropped after all retries."""
        one = self._rollouts[message.rollout]
        self._hooks.record(
            records.RolloutScored(
                rollout=message.rollout,
                reward=message.reward,
                checks=message.checks,
                error=message.error,
                tries=message.tries,
            )
        )
        if one.end is EndReason.START_FAILED:
            one.reward = 0.0
            self._enter(one, "placeholder", message.error)
        elif message.error:
            self._enter(one, "dropped", message.error)
        else:
            one.reward = message.reward
            self._enter(one, "scored")
        self._hooks.settled(one)

    def forget_group(self, rollouts: list[RolloutId]) -> list[Finished]:
        """Take a settled group out of the book: its members that have a reward."""
        taken = [self._rollouts.pop(rollout) for rollout in rollouts]
        return [
            Finished(rollout=one.rollout, tree=one.session.tree, reward=one.reward, task=one.task)
            for one in taken
            if one.reward is not None
        ]

    # --- model calls ------------------------------------------------------------------------------

    def model_call(self, call: ModelCall) -> None:
        """A harness asks for a turn (or something smaller)."""
        one = self._rollouts.get(call.rollout)
        if one is None or one.state not in ("admitted", "running"):
            log.warning("call=%s rollout=%s late", call.call, call.rollout)
            return
        outcome = one.session.open(call)
        match outcome:
            case Answered():
                self._hooks.to_hands(outcome.answer)
            case Sampling():
                one.turn_began[outcome.call] = self._hooks.clock()
                self._hooks.submit(
                    Turn(
                        call=outcome.call,
                        rollout=call.rollout,
                        prompt=outcome.prompt,
                        max_new_tokens=outcome.max_new_tokens,
                        temperature=outcome.temperature,
                        top_p=outcome.top_p,
                        seed=turn_seed(seed=self._settings.run.seed, rollout=call.rollout, turn=outcome.turn),
                        stop_tokens=tuple(outcome.stop_tokens),
                    )
                )
            case Waiting():
                pass  # It is answered with the request it joined.

    def model_call_gone(self, gone: ModelCallGone) -> None:
        """The client hung up. Sampling goes on: the turn is kept for the retry that usually follows."""
        one = self._rollouts.get(gone.rollout)
        if one is not None:
            one.session.gone(gone.call)

    def turn_done(self, turn: Turn, sample: Sample) -> None:
        """The turn is sampled: attach it to the tree, record it, answer the harness."""
        one = self._rollouts.get(turn.rollout)
        if one is None:
            return
        answers = one.session.close(turn.call, sample)
        self.tokens_sampled += len(sample.tokens)
        self._record_turn(one, turn, sample)
        for answer in answers:
            self._hooks.to_hands(answer)

    def turn_failed(self, turn: Turn, error: str) -> None:
        """The engines could not sample the turn: the harness gets its vendor's overload error."""
        one = self._rollouts.get(turn.rollout)
        if one is None:
            return
        self.harness_errors += 1
        self._hooks.record(records.HarnessError(rollout=turn.rollout, detail=error, time=self._hooks.clock()))
        for answer in one.session.fail(turn.call, 503, error):
            self._hooks.to_hands(answer)

    def _session_settings(self, api_key: str) -> SessionSettings:
        settings = self._settings
        return SessionSettings(
            model_name=settings.run.name,
            api_key=api_key,
            temperature=settings.sampling.temperature,
            top_p=settings.sampling.top_p,
            max_turn_tokens=settings.sampling.max_turn_tokens,
            max_context_tokens=settings.model.max_context_tokens,
        )

    def _record_turn(self, one: Rollout, turn: Turn, sample: Sample) -> None:
        closed, now = one.session.turns[-1], self._hooks.clock()
        self._hooks.record(
            records.TurnDone(
                rollout=one.rollout,
                turn=closed.turn,
                call=turn.call,
                context_tokens=ids_to_bytes(closed.context),
                parent_node=closed.parent,
                node=closed.sampled,
                output_tokens=ids_to_bytes(sample.tokens),
                logprobs=sample.logprobs.astype("<f4").tobytes(),
                spans=[(span.start, span.end, span.version) for span in sample.spans],
                finish=sample.finish.value,
                cached_tokens=sample.cached_tokens,
                retokenised=one.session.stats.retokenised_tokens,
                moved=turn.moved,
                seconds=now - one.turn_began.pop(turn.call, now),
                time=now,
                waited_s=turn.waited_s,
            )
        )

    def _enter(self, one: Rollout, state: str, detail: str = "") -> None:
        one.state, one.since = state, self._hooks.clock()
        self._hooks.record(
            records.RolloutChanged(
                rollout=one.rollout,
                state=state,
                task=one.task.name,
                purpose=one.purpose.value,
                group=one.group,
                time=one.since,
                detail=detail,
            )
        )
