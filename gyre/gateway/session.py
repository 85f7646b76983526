"""The model API of one rollout: requests in, prompts out; samples in, answers and the trajectory tree out.

Synchronous, no I/O, no clock. Every call ends in exactly one answer, unless its client is gone. The prompt
of a call is the exact ids of the matched path and the ids of what is new; a turn enters the tree only when
it was sampled. A byte-identical request joins the one that runs, or is told the answer again. Nothing that
a client sends makes a session raise: what cannot be served is answered in the vendor's own words.
"""

import hmac
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import xxhash

from gyre.config.choices import PathRole, ReasoningHistory
from gyre.gateway.dialect import (
    Dialect,
    HttpAnswer,
    Message,
    ModelRequest,
    Reply,
    RequestRefused,
    Speaker,
    ToolCall,
    json_answer,
)
from gyre.gateway.dialects import bare_path, dialect_of
from gyre.gateway.history import History, Match, Told
from gyre.gateway.identify import CALLER_HEADERS, caller_of, first_words, prompts_in, role_of
from gyre.gateway.parse import ParsedTurn, TurnParser
from gyre.gateway.render import Renderer
from gyre.gateway.template import RenderError
from gyre.tree.tree import Tree, common_prefix
from gyre.types import FinishReason, Int32, RolloutId, Sample
from gyre.wire.messages import ModelAnswer, ModelCall

log = logging.getLogger(__name__)

MAX_REPLAYS = 2
"""Times a finished answer is told again. A client that still asks wants another sample, not the same one."""

REMEMBERED_ANSWERS = 16

OPEN_PATHS = frozenset({"/", "/api/hello", "/health"})
"""What is asked without a key, to see whether somebody is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What the run rules. A client's smaller bound on tokens is honoured; its temperature and top_p are not.

    `models` are the names that are served besides `model_name`; none: every name is.
    """

    temperature: float
    top_p: float
    max_turn_tokens: int
    max_context_tokens: int
    model_name: str
    api_key: str
    models: tuple[str, ...] = ()
    reasoning_history: ReasoningHistory = ReasoningHistory.KEEP


@dataclass(slots=True, kw_only=True)
class SessionStats:
    """Counts of one session.

    `retokenised_tokens` are sampled tokens that a later prompt did not repeat exactly; `restored_turns` came back
    otherwise than they were told; `forks` are turns that opened a new path of the tree.
    """

    turns: int = 0
    new_tokens: int = 0
    retokenised_tokens: int = 0
    forks: int = 0
    malformed_tool_calls: int = 0
    errors_sent: int = 0
    context_overflows: int = 0
    retries_joined: int = 0
    retries_replayed: int = 0
    restored_turns: int = 0

    @property
    def fork_rate(self) -> float:
        """Forks per turn."""
        return self.forks / self.turns if self.turns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The call wants a turn: sample it, then `close` or `fail` the call. `turn` counts from 0."""

    call: str
    prompt: Int32
    max_new_tokens: int
    temperature: float
    top_p: float
    turn: int
    stop_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The call needs no sampling."""

    answer: ModelAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """The call repeats one that is being sampled; it is answered when `close` or `fail` names `joined`."""

    joined: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """A closed turn, for the journal: `context` was attached under `parent`, `sampled` is the turn's node."""

    call: str
    turn: int
    parent: int | None
    context: Int32
    context_node: int
    sampled: int
    finish: FinishReason
    role: PathRole = PathRole.MAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Where a request's prompt lies: `context` goes under `parent`; the whole prompt is `prompt`."""

    history_key: bytes
    parent: int | None
    context: Int32
    prompt: Int32
    role: PathRole


@dataclass(slots=True, kw_only=True)
class _Running:
    """A call whose turn is being sampled, and everybody who waits for it."""

    dialect: Dialect
    request: ModelRequest
    body_key: bytes
    plan: _Plan
    turn: int
    waiters: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Told:
    answer: HttpAnswer
    replays: int = 0


class Session:
    """One rollout's conversations with the policy."""

    def __init__(
        self, rollout: RolloutId, template: Renderer, settings: SessionSettings, parser: TurnParser | None = None
    ) -> None:
        """`template` may be shared by all sessions; `settings.api_key` is this rollout's own."""
        self.rollout = rollout
        self.tree = Tree()
        self.stats = SessionStats()
        self.turns: list[SessionTurn] = []
        self._renderer = template
        self._settings = settings
        self._parser: TurnParser = parser or template.parser
        self._history = History()
        self._prompts: set[str] = set()
        self._running: dict[str, _Running] = {}
        self._by_body: dict[bytes, str] = {}
        self._told: OrderedDict[bytes, _Told] = OrderedDict()
        self._num_opened = 0

    @property
    def running(self) -> tuple[str, ...]:
        """Calls that await `close` or `fail`."""
        return tuple(self._running)

    def open(self, call: ModelCall) -> Sampling | Answered | Waiting:
        """Take a request. Never raises on anything a client sent."""
        path = bare_path(call.path)
        headers = {name.lower(): value for name, value in call.headers.items()}
        dialect = dialect_of(path, headers)
        try:
            if call.method in ("GET", "HEAD") and path in OPEN_PATHS:
                return Answered(answer=_answer(call.call, json_answer(200, {})))
            self._check_key(headers, dialect)
            if dialect.is_turn(call.method, path):
                return self._open_turn(call, path, headers, dialect)
            return Answered(answer=_answer(call.call, self._side_answer(call, path, headers, dialect)))
        except RequestRefused as refused:
            return Answered(answer=self._refuse(call.call, refused, dialect))

    def close(self, call_id: str, sample: Sample) -> list[ModelAnswer]:
        """Attach the sampled turn and answer the call and the retries that joined it.

        `sample` is whole: a turn that moved between cells is stitched before. Unknown calls are a fault of
        the caller (KeyError).
        """
        assert sample.finish is not FinishReason.ABORT, f"call {call_id} was aborted, not sampled"
        running = self._forget(call_id)
        plan = running.plan
        leaves_before = self.tree.num_leaves
        context_node = self.tree.add_context(plan.parent, plan.context, plan.role)
        node = self.tree.add_sampled(context_node, sample, plan.role)
        self.stats.forks += int(0 < leaves_before < self.tree.num_leaves)
        self.stats.turns += 1
        self.stats.new_tokens += len(plan.context)
        self.turns.append(
            SessionTurn(
                call=call_id,
                turn=running.turn,
                parent=plan.parent,
                context=plan.context,
                context_node=context_node,
                sampled=node,
                finish=sample.finish,
                role=plan.role,
            )
        )
        request = running.request
        parsed = self._parser.parse(self._said(sample), request.tools if request.calls_tools else ())
        self.stats.malformed_tool_calls += parsed.num_malformed
        message = self._message(running, parsed)
        told = Told(turn=running.turn, message=message, node=node, role=plan.role, is_thinking=parsed.is_thinking)
        self._history.remember(plan.history_key, told)
        reply = Reply(
            id=f"{self.rollout}-{running.turn}",
            model=request.model or self._settings.model_name,
            message=message,
            finish=sample.finish,
            prompt_tokens=len(plan.prompt),
            new_tokens=len(sample.tokens),
            cached_tokens=sample.cached_tokens,
        )
        answer = running.dialect.answer(request, reply)
        self._told[running.body_key] = _Told(answer=answer)
        while len(self._told) > REMEMBERED_ANSWERS:
            self._told.popitem(last=False)
        return [_answer(waiter, answer) for waiter in running.waiters]

    def fail(self, call_id: str, status: int, message: str) -> list[ModelAnswer]:
        """Answer the call and the retries that joined it with an error. Nothing is attached or remembered."""
        running = self._forget(call_id)
        refused = RequestRefused(status, message)
        return [self._refuse(waiter, refused, running.dialect) for waiter in running.waiters]

    def gone(self, call_id: str) -> bool:
        """The client of a call hung up: it gets no answer. True when nobody waits for its turn any more.

        Sampling may go on all the same: the turn is then kept for the retry that usually follows.
        """
        for running in self._running.values():
            if call_id in running.waiters:
                running.waiters.remove(call_id)
                return not running.waiters
        return False

    def _open_turn(
        self, call: ModelCall, path: str, headers: Mapping[str, str], dialect: Dialect
    ) -> Sampling | Answered | Waiting:
        body_key = _body_key(path, headers, call.body)
        if body_key in self._by_body:
            first = self._by_body[body_key]
            self._running[first].waiters.append(call.call)
            self.stats.retries_joined += 1
            return Waiting(joined=first)
        told = self._told.get(body_key)
        if told is not None and told.replays < MAX_REPLAYS:
            told.replays += 1
            self.stats.retries_replayed += 1
            return Answered(answer=_answer(call.call, told.answer))
        request = dialect.parse(call.body)
        self._check_model(request.model, dialect)
        plan = self._plan(request, headers, dialect)
        room = self._settings.max_context_tokens - len(plan.prompt)
        if room <= 0:
            self.stats.context_overflows += 1
            raise dialect.context_overflow(
                prompt_tokens=len(plan.prompt), max_context_tokens=self._settings.max_context_tokens
            )
        bounds = [room, self._settings.max_turn_tokens, request.max_new_tokens or room]
        turn = self._num_opened
        self._num_opened += 1
        self._by_body[body_key] = call.call
        self._running[call.call] = _Running(
            dialect=dialect, request=request, body_key=body_key, plan=plan, turn=turn, waiters=[call.call]
        )
        return Sampling(
            call=call.call,
            prompt=plan.prompt,
            max_new_tokens=min(bounds),
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            turn=turn,
            stop_tokens=self._renderer.template.stop_tokens,
        )

    def _plan(self, request: ModelRequest, headers: Mapping[str, str], dialect: Dialect) -> _Plan:
        """The prompt of a request and its place in the tree."""
        messages, role_before = self._history.restore(request.messages)
        self.stats.restored_turns = self._history.num_restored
        keys = self._history.keys(messages, request.tools)
        match = self._history.match(keys)
        if match.told is not None:
            role_before = match.told.role
        was_prompted = role_before is None and self._was_prompted(messages)
        try:
            parent, context, prompt = self._prompt(messages, request, match)
        except RenderError as error:
            raise dialect.unrenderable(str(error)) from error
        if len(prompt) == 0:
            raise dialect.unrenderable("they render to nothing.")
        role = role_of(caller_of(headers, request), role_before, was_prompted=was_prompted)
        return _Plan(history_key=keys[-1], parent=parent, context=context, prompt=prompt, role=role)

    def _prompt(self, messages: list[Message], request: ModelRequest, match: Match) -> tuple[int | None, Int32, Int32]:
        """(node to attach under, new context ids, whole prompt ids) of a request."""
        told = match.told
        if told is None:
            prompt = self._renderer.prompt(messages, request.tools)
            return None, prompt, prompt
        before = self.tree.path(told.node)
        matched, new = messages[: match.num_messages], messages[match.num_messages :]
        is_renewed = self._renews_reasoning(matched, new)
        if not is_renewed:
            suffix = self._renderer.suffix(matched, new, request.tools, int(before[-1]), is_thinking=told.is_thinking)
            if suffix is not None:
                return told.node, suffix, np.concatenate([before, suffix])
        prompt = self._renderer.prompt(messages, request.tools)
        agreed = common_prefix(before, prompt)
        if not is_renewed and agreed < len(before):
            self.stats.retokenised_tokens += self._sampled_beyond(told.node, agreed)
        steps = [step for step in self.tree.path_nodes(told.node) if self.tree.path_length(step) <= agreed]
        parent = next((step for step in reversed(steps) if self.tree.path_length(step) < len(prompt)), None)
        return parent, prompt[self.tree.path_length(parent) :], prompt

    def _renews_reasoning(self, matched: list[Message], new: list[Message]) -> bool:
        """Whether the template drops reasoning at what is new, and the run leaves that to the template."""
        return (
            self._settings.reasoning_history is ReasoningHistory.TEMPLATE
            and self._renderer.drops_reasoning
            and any(message.speaker is Speaker.USER for message in new)
            and any(message.reasoning for message in matched)
        )

    def _was_prompted(self, messages: list[Message]) -> bool:
        """Whether the conversation begins with a task that one of the policy's calls has given."""
        words = first_words(messages).rstrip()
        return any(words.endswith(prompt) for prompt in self._prompts)

    def _message(self, running: _Running, parsed: ParsedTurn) -> Message:
        """A parsed turn as it is told. The ids of its calls are a function of the rollout and the turn."""
        calls = []
        for index, (name, arguments) in enumerate(parsed.calls):
            digest = xxhash.xxh3_128_hexdigest(f"{self.rollout} {running.turn} {index}".encode())
            calls.append(ToolCall(id=running.dialect.call_prefix + digest[:24], name=name, arguments=arguments))
            self._prompts.update(prompts_in(arguments))
        return Message(
            speaker=Speaker.ASSISTANT, content=parsed.content, reasoning=parsed.reasoning, tool_calls=tuple(calls)
        )

    def _sampled_beyond(self, node_id: int | None, agreed: int) -> int:
        """Sampled tokens on the path of `node_id` that are not within its first `agreed` tokens."""
        nodes = [self.tree.node(step) for step in self.tree.path_nodes(node_id)]
        return sum(
            len(node.tokens) - min(max(agreed - node.depth, 0), len(node.tokens)) for node in nodes if node.sampled
        )

    def _said(self, sample: Sample) -> str:
        """The text of a turn as the harness gets it: without the token that ended it."""
        tokens = sample.tokens
        if len(tokens) and int(tokens[-1]) in self._renderer.template.stop_tokens:
            tokens = tokens[:-1]
        return self._renderer.template.decode(tokens)

    def _check_key(self, headers: Mapping[str, str], dialect: Dialect) -> None:
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self._settings.api_key.encode()):
            log.warning("call=refused reason=%s rollout=%s", "wrong_key" if given else "no_key", self.rollout)
            raise dialect.wrong_key(given)

    def _check_model(self, name: str, dialect: Dialect) -> None:
        served = self._settings.models
        if name and served and name not in (self._settings.model_name, *served):
            raise dialect.unknown_model(name)

    def _side_answer(self, call: ModelCall, path: str, headers: Mapping[str, str], dialect: Dialect) -> HttpAnswer:
        """The answer to what needs no sampling. Raises RequestRefused for what nobody serves."""
        if dialect.is_count(call.method, path):
            request = dialect.parse(call.body, is_count=True)
            self._check_model(request.model, dialect)
            return dialect.count(len(self._plan(request, headers, dialect).prompt))
        if call.method in ("GET", "HEAD") and path == "/models":
            return dialect.models([self._settings.model_name, *self._settings.models])
        if call.method in ("GET", "HEAD") and path.startswith("/models/"):
            name = path.removeprefix("/models/")
            self._check_model(name, dialect)
            return dialect.model(name)
        raise dialect.unknown_path(call.method, path)

    def _refuse(self, call_id: str, refused: RequestRefused, dialect: Dialect) -> ModelAnswer:
        self.stats.errors_sent += 1
        return _answer(call_id, dialect.refusal(refused))

    def _forget(self, call_id: str) -> _Running:
        running = self._running.pop(call_id)
        del self._by_body[running.body_key]
        return running


def _answer(call_id: str, answer: HttpAnswer) -> ModelAnswer:
    return ModelAnswer(call=call_id, status=answer.status, headers=dict(answer.headers), chunks=list(answer.chunks))


def _body_key(path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """What makes two requests one: path, caller and body."""
    caller = "\0".join((path, *(headers.get(name, "") for name in CALLER_HEADERS)))
    return xxhash.xxh3_128_digest(caller.encode(errors="replace") + b"\0\0" + body)
