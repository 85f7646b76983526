"""The life of one rollout on its node: sandbox, harness, end, reap, snapshot, fresh sandbox, score.

    prepared -> running -> ended (told at once) -> reaped -> snapshot -> graded (retry grading only) -> told

The gateway socket and the agent's sandbox are closed before grading begins. Whatever happens, the sandboxes
of the attempt are closed when `run` returns, also when it is cancelled. What cannot be told is logged by the
caller: this file sends messages and knows no link.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gyre.config.schema import Settings
from gyre.errors import DeadlineError, EvaluationError, GyreError, SandboxError, TaskError
from gyre.gateway.app import Closer, build_app, serve_on
from gyre.harness.harness import DETAIL_CHARS, AgentExit, AgentRequest, Harness
from gyre.sandbox.sandbox import Sandbox, Sandboxes
from gyre.sandbox.spec import Limits, SandboxSpec
from gyre.tasks.harbor import Task, load_task
from gyre.tasks.verifier import grade, pack_folder, prepare, spec_for
from gyre.types import EndReason, Score
from gyre.wire.messages import AgentEnded, AgentStarted, Graded, Message, ModelAnswer, ModelCall, StartAgent

log = logging.getLogger(__name__)

CACHED_TASKS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTask:
    """A task with its folders as tar archives, read once a node."""

    task: Task
    environment: bytes
    tests: bytes


class TaskShelf:
    """Packed tasks by folder; the oldest leave when there are too many."""

    def __init__(self) -> None:
        self._packed: dict[str, PackedTask] = {}

    def get(self, folder: str) -> PackedTask:
        """TaskError when the folder cannot be run here."""
        packed = self._packed.get(folder)
        if packed is None:
            task = load_task(Path(folder))
            packed = PackedTask(task=task, environment=pack_folder(task.environment), tests=pack_folder(task.tests))
            if len(self._packed) >= CACHED_TASKS:
                del self._packed[next(iter(self._packed))]
            self._packed[folder] = packed
        return packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What all attempts of a node share. `post` queues a message for the front and never blocks."""

    settings: Settings
    sandboxes: Sandboxes
    harness: Harness
    harness_ready: asyncio.Future[None]
    shelf: TaskShelf
    starts: asyncio.Semaphore
    gradings: asyncio.Semaphore
    post: Callable[[Message], None]
    ask: Callable[[ModelCall], Awaitable[ModelAnswer]]

    @property
    def base_spec(self) -> SandboxSpec:
        """The sandbox of [sandbox], before a task asks for less."""
        chosen = self.settings.sandbox
        limits = Limits(
            memory_mb=chosen.memory_mb, processes=chosen.processes, disk_mb=chosen.disk_mb, cpu_s=chosen.cpu_s
        )
        return SandboxSpec(limits=limits)


class Attempt:
    """One rollout, from StartAgent to Graded."""

    def __init__(self, order: StartAgent, shop: Workshop) -> None:
        self._order, self._shop = order, shop
        self._sandbox: Sandbox | None = None
        self._close_gateway: Closer | None = None
        self._began = time.monotonic()
        self._is_end_told = self._is_grade_told = False
        self._last_status = 200

    async def run(self) -> None:
        """The whole life. Failures of the outside world are told to the front, they do not raise."""
        try:
            packed, agent_exit = await self._agent()
            self._tell_end(agent_exit)
            if packed is None or agent_exit.end is EndReason.START_FAILED:
                self._tell_grade(Score(reward=0.0), tries=0, seconds=0.0)  # Nothing to grade: the placeholder.
            else:
                await self._grade(packed)
        finally:
            await self._close()

    def tell_failure(self, reason: str) -> None:
        """What was not told before `run` raised: an end, and a grading that cannot come."""
        if not self._is_end_told:
            self._tell_end(AgentExit(end=EndReason.START_FAILED, detail=reason))
        if not self._is_grade_told:
            self._tell_grade(Score(reward=0.0), error=reason, tries=0, seconds=0.0)

    def _tell_grade(self, score: Score, *, tries: int, seconds: float, error: str = "") -> None:
        self._is_grade_told = True
        self._shop.post(
            Graded(
                rollout=self._order.rollout,
                reward=score.reward,
                checks=score.checks,
                error=error,
                tries=tries,
                seconds=seconds,
            )
        )

    def _tell_end(self, agent_exit: AgentExit) -> None:
        self._is_end_told = True
        self._shop.post(
            AgentEnded(
                rollout=self._order.rollout,
                end=agent_exit.end.value,
                detail=agent_exit.detail,
                seconds=time.monotonic() - self._began,
            )
        )

    async def _agent(self) -> tuple[PackedTask | None, AgentExit]:
        """Prepare and run the agent; its processes are dead when this returns."""
        try:
            async with self._shop.starts:
                packed = self._shop.shelf.get(self._order.task)
                await asyncio.shield(self._shop.harness_ready)
                sandbox = await self._prepare(packed)
        except (TaskError, SandboxError, DeadlineError, OSError) as error:
            return None, AgentExit(end=EndReason.START_FAILED, detail=str(error))
        agent_exit = await self._shop.harness.run(self._request(packed.task), sandbox, self._tell_start)
        if agent_exit.end is EndReason.DONE and self._last_status >= 500:
            # Some harnesses take a stream that broke for an end in order.
            words = f"it ended on a model call that failed with {self._last_status}; {agent_exit.detail}"
            agent_exit = AgentExit(end=EndReason.HARNESS_ERROR, detail=words[:DETAIL_CHARS])
        try:
            await self._leave_gateway()
            await sandbox.reap()
        except GyreError as error:
            log.warning("rollout=%s reap=failed error=%s", self._order.rollout, error)
        return packed, agent_exit

    async def _prepare(self, packed: PackedTask) -> Sandbox:
        shop = self._shop
        spec = replace(spec_for(packed.task, shop.base_spec), read_only=shop.harness.read_only)
        sandbox = self._sandbox = await shop.sandboxes.start(spec)
        await prepare(packed.task, sandbox, environment=packed.environment)
        listener = await sandbox.listen(shop.settings.sandbox.gateway_port)
        gateway = shop.settings.gateway
        app = build_app(self._order.rollout, self._ask, shop.post, gateway.ping_s, gateway.body_limit_mb << 20)
        self._close_gateway = await serve_on(listener, app)
        return sandbox

    async def _ask(self, call: ModelCall) -> ModelAnswer:
        """The front's answer. The closing of the gateway ends the wait, if the front never answers."""
        answer = await self._shop.ask(call)
        self._last_status = answer.status
        return answer

    def _request(self, task: Task) -> AgentRequest:
        return AgentRequest(
            rollout=self._order.rollout,
            instruction=task.instruction,
            base_url=f"http://127.0.0.1:{self._shop.settings.sandbox.gateway_port}/v1",
            api_key=self._order.api_key,
            model=self._order.model,
            workdir=task.workdir,
            deadline_s=task.agent_s,
        )

    def _tell_start(self) -> None:
        self._shop.post(AgentStarted(rollout=self._order.rollout, seconds=time.monotonic() - self._began))

    async def _leave_gateway(self) -> None:
        close, self._close_gateway = self._close_gateway, None
        if close is not None:
            await close()

    async def _close(self) -> None:
        await self._leave_gateway()
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _grade(self, packed: PackedTask) -> None:
        """Snapshot, then grade with retries, and tell the score or the evaluation failure."""
        began, error, tries, score = time.monotonic(), "", 0, Score(reward=0.0)
        try:
            assert self._sandbox is not None
            max_bytes = 2 * self._sandbox.spec.limits.disk_mb << 20
            snapshot = await self._sandbox.pull(packed.task.workdir, max_bytes=max_bytes)
            await self._sandbox.close()
            async with self._shop.gradings:
                while not tries or (error and tries <= self._shop.settings.rollout.grading_retries):
                    tries += 1
                    score, error = await self._try_grade(packed, snapshot)
        except GyreError as failure:
            error = str(failure)
        self._tell_grade(score, error=error, tries=tries, seconds=time.monotonic() - began)

    async def _try_grade(self, packed: PackedTask, snapshot: bytes) -> tuple[Score, str]:
        shop = self._shop
        try:
            score = await grade(packed.task, snapshot, shop.sandboxes.start, base=shop.base_spec, tests=packed.tests)
        except EvaluationError as error:
            log.warning("rollout=%s grading=failed error=%s", self._order.rollout, error)
            return Score(reward=0.0), str(error)
        return score, ""
