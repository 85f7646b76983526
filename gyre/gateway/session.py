"""The model API of one rollout: requests in, prompts out; samples in, answers and the trajectory tree out.

Synchronous, no I/O, no clock. Every call ends in exactly one answer, unless its client is gone. The prompt
of a call is the exact ids of the matched path and the ids of what is new; a turn enters the tree only when
it was sampled. A byte-identical request joins the one that runs, or is told the answer again. Nothing that
a client sends makes a session raise: what cannot be served is answered in the vendor's own words.
"""

import hmac
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import xxhash

from gyre.gateway.chat import ChatDialect, json_answer
from gyre.gateway.dialect import Dialect, HttpAnswer, Message, ModelRequest, Reply, RequestRefused, Speaker
from gyre.gateway.history import History, extended
from gyre.gateway.render import Renderer
from gyre.gateway.template import RenderError
from gyre.tree.tree import Tree, common_prefix
from gyre.types import FinishReason, Int32, RolloutId, Sample
from gyre.wire.messages import ModelAnswer, ModelCall

MAX_REPLAYS = 2
"""Times a finished answer is told again. A client that still asks wants another sample, not the same one."""

REMEMBERED_ANSWERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What the run rules. A client's smaller bound on tokens is honoured; its temperature and top_p are not."""

    temperature: float
    top_p: float
    max_turn_tokens: int
    max_context_tokens: int
    model_name: str
    api_key: str


@dataclass(slots=True, kw_only=True)
class SessionStats:
    """Counts of one session. `retokenised_tokens` are sampled tokens that a later prompt did not repeat exactly."""

    turns: int = 0
    new_tokens: int = 0
    retokenised_tokens: int = 0
    forks: int = 0
    malformed_tool_calls: int = 0
    errors_sent: int = 0
    context_overflows: int = 0
    retries_joined: int = 0
    retries_replayed: int = 0


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


@dataclass(slots=True, kw_only=True)
class _Running:
    """A call whose turn is being sampled, and everybody who waits for it."""

    request: ModelRequest
    body_key: bytes
    history_key: bytes
    parent: int | None
    context: Int32
    prompt_tokens: int
    turn: int
    waiters: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Told:
    answer: HttpAnswer
    replays: int = 0


class Session:
    """One rollout's conversations with the policy."""

    def __init__(
        self,
        rollout: RolloutId,
        template: Renderer,
        settings: SessionSettings,
        dialect: Dialect | None = None,
    ) -> None:
        """`template` may be shared by all sessions; `settings.api_key` is this rollout's own."""
        self.rollout = rollout
        self.tree = Tree()
        self.stats = SessionStats()
        self.turns: list[SessionTurn] = []
        self._renderer = template
        self._settings = settings
        self._dialect: Dialect = dialect or ChatDialect()
        self._history = History()
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
        try:
            self._check_key(call.headers)
            if self._dialect.is_turn(call.method, path):
                return self._open_turn(call, path)
            return Answered(answer=self._tell(call.call, self._side_answer(call.method, path)))
        except RequestRefused as refused:
            return Answered(answer=self._refuse(call.call, refused))

    def close(self, call_id: str, sample: Sample) -> list[ModelAnswer]:
        """Attach the sampled turn and answer the call and the retries that joined it.

        `sample` is whole: a turn that moved between cells is stitched before. Unknown calls are a fault of
        the caller (KeyError).
        """
        assert sample.finish is not FinishReason.ABORT, f"call {call_id} was aborted, not sampled"
        running = self._forget(call_id)
        leaves_before = self.tree.num_leaves
        context_node = self.tree.add_context(running.parent, running.context)
        node = self.tree.add_sampled(context_node, sample)
        self.stats.forks += int(0 < leaves_before < self.tree.num_leaves)
        self.stats.turns += 1
        self.stats.new_tokens += len(running.context)
        self.turns.append(
            SessionTurn(
                call=call_id,
                turn=running.turn,
                parent=running.parent,
                context=running.context,
                context_node=context_node,
                sampled=node,
                finish=sample.finish,
            )
        )
        message = Message(speaker=Speaker.ASSISTANT, content=self._said(sample))
        self._history.remember(extended(running.history_key, message), node)
        reply = Reply(
            id=f"{self.rollout}-{running.turn}",
            model=running.request.model or self._settings.model_name,
            message=message,
            finish=sample.finish,
            prompt_tokens=running.prompt_tokens,
            new_tokens=len(sample.tokens),
            cached_tokens=sample.cached_tokens,
        )
        answer = self._dialect.answer(running.request, reply)
        self._told[running.body_key] = _Told(answer=answer)
        while len(self._told) > REMEMBERED_ANSWERS:
            self._told.popitem(last=False)
        return [self._tell(waiter, answer) for waiter in running.waiters]

    def fail(self, call_id: str, status: int, message: str) -> list[ModelAnswer]:
        """Answer the call and the retries that joined it with an error. Nothing is attached or remembered."""
        running = self._forget(call_id)
        return [self._refuse(waiter, RequestRefused(status, message)) for waiter in running.waiters]

    def gone(self, call_id: str) -> bool:
        """The client of a call hung up: it gets no answer. True when nobody waits for its turn any more.

        Sampling may go on all the same: the turn is then kept for the retry that usually follows.
        """
        for running in self._running.values():
            if call_id in running.waiters:
                running.waiters.remove(call_id)
                return not running.waiters
        return False

    def _open_turn(self, call: ModelCall, path: str) -> Sampling | Answered | Waiting:
        body_key = xxhash.xxh3_128_digest(path.encode(errors="replace") + b"\0" + call.body)
        if body_key in self._by_body:
            first = self._by_body[body_key]
            self._running[first].waiters.append(call.call)
            self.stats.retries_joined += 1
            return Waiting(joined=first)
        told = self._told.get(body_key)
        if told is not None and told.replays < MAX_REPLAYS:
            told.replays += 1
            self.stats.retries_replayed += 1
            return Answered(answer=self._tell(call.call, told.answer))
        request = self._dialect.parse(call.body)
        keys = self._history.keys(request.messages, request.tools)
        parent, context, prompt = self._prompt(request, keys)
        if len(prompt) == 0:
            raise RequestRefused(400, "Invalid 'messages': they render to nothing.", param="messages")
        room = self._settings.max_context_tokens - len(prompt)
        if room <= 0:
            self.stats.context_overflows += 1
            raise self._dialect.context_overflow(
                prompt_tokens=len(prompt), max_context_tokens=self._settings.max_context_tokens
            )
        bounds = [room, self._settings.max_turn_tokens, request.max_new_tokens or room]
        turn = self._num_opened
        self._num_opened += 1
        self._by_body[body_key] = call.call
        self._running[call.call] = _Running(
            request=request,
            body_key=body_key,
            history_key=keys[-1],
            parent=parent,
            context=context,
            prompt_tokens=len(prompt),
            turn=turn,
            waiters=[call.call],
        )
        return Sampling(
            call=call.call,
            prompt=prompt,
            max_new_tokens=min(bounds),
            temperature=self._settings.temperature,
            top_p=self._settings.top_p,
            turn=turn,
            stop_tokens=self._renderer.template.stop_tokens,
        )

    def _prompt(self, request: ModelRequest, keys: list[bytes]) -> tuple[int | None, Int32, Int32]:
        """(node to attach under, new context ids, whole prompt ids) of a request."""
        match = self._history.match(keys)
        matched, new = request.messages[: match.num_messages], request.messages[match.num_messages :]
        before = self.tree.path(match.node)
        try:
            suffix = None
            if match.node is not None:
                suffix = self._renderer.suffix(matched, new, request.tools, int(before[-1]))
            if suffix is not None:
                return match.node, suffix, np.concatenate([before, suffix])
            prompt = self._renderer.prompt(request.messages, request.tools)
        except RenderError as error:
            raise RequestRefused(400, f"Invalid 'messages': {error}", param="messages") from error
        agreed = common_prefix(before, prompt)
        if match.node is not None and agreed == len(before) < len(prompt):
            return match.node, prompt[agreed:], prompt
        self.stats.retokenised_tokens += self._sampled_beyond(match.node, agreed)
        return None, prompt, prompt

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

    def _check_key(self, headers: Mapping[str, str]) -> None:
        given = next((value for name, value in headers.items() if name.lower() == "authorization"), "")
        given = given.removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), self._settings.api_key.encode()):
            raise self._dialect.wrong_key(given)

    def _side_answer(self, method: str, path: str) -> HttpAnswer:
        answer = self._dialect.side_answer(method, path, self._settings.model_name)
        if answer is not None:
            return answer
        if method in ("GET", "HEAD") and path in ("/", "/api/hello", "/health"):
            return json_answer(200, {})
        raise RequestRefused(404, f"Unknown request: {method[:16]} {path[:200]}", code="unknown_url")

    def _tell(self, call_id: str, answer: HttpAnswer) -> ModelAnswer:
        return ModelAnswer(call=call_id, status=answer.status, headers=dict(answer.headers), chunks=list(answer.chunks))

    def _refuse(self, call_id: str, refused: RequestRefused) -> ModelAnswer:
        self.stats.errors_sent += 1
        return self._tell(call_id, self._dialect.refusal(refused))

    def _forget(self, call_id: str) -> _Running:
        running = self._running.pop(call_id)
        del self._by_body[running.body_key]
        return running


def bare_path(path: str) -> str:
    """The path without query, trailing slash and any /v1 in front (clients put it there twice, once or never)."""
    path = "/" + path.split("?", 1)[0].strip("/")
    while path == "/v1" or path.startswith("/v1/"):
        path = path.removeprefix("/v1") or "/"
    return path
