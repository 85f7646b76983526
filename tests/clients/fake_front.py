"""A front for tests: the real link, and a scripted model that answers chat completions."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

from gyre.wire.link import FrontLink
from gyre.wire.messages import (
    AgentEnded,
    AgentStarted,
    Graded,
    HandsFailed,
    HandsUp,
    Heartbeat,
    Message,
    ModelAnswer,
    ModelCall,
    StartAgent,
    Stop,
)

REPOSITORY = Path(__file__).resolve().parents[2]
HELLO = REPOSITORY / "tests" / "data" / "tasks" / "hello"
Script = Callable[[str, int], str]
"""(rollout, number of its earlier answers) -> the text of the assistant's turn."""

CONFIG = """
[run]
name = "clients"
steps = 0
[model]
path = "none"
max_context_tokens = {context_tokens}
[engine]
max_total_tokens = 400000
[sampling]
max_turn_tokens = {turn_tokens}
[trainer]
micro_step_tokens = 400000
learning_rate = 1e-4
[schedule]
groups_per_batch = 1
rollouts_per_group = 2
cell_capacity = 8
[rollout]
harness = "{harness}"
[tasks]
train = "none"
[stop]
alone_s = {alone_s}
"""


def fence(command: str) -> str:
    """A turn with one command."""
    return f"```sh\n{command}\n```"


SUBMIT = fence("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


class FakeFront:
    """Starts real hands as a child process and plays the front's side."""

    def __init__(
        self,
        folder: Path,
        script: Script,
        *,
        harness: str,
        alone_s: float = 10.0,
        context_tokens: int = 4096,
        turn_tokens: int = 1024,
    ) -> None:
        self.folder, self._script = folder, script
        self.config = folder / "config.toml"
        self.config.write_text(
            CONFIG.format(harness=harness, alone_s=alone_s, context_tokens=context_tokens, turn_tokens=turn_tokens)
        )
        self.link = FrontLink()
        self.told: list[Message] = []
        self.calls: list[ModelCall] = []
        self.silent = False
        self._turns: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "FakeFront":
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gyre.program.hands", "--front", self.link.address, "--config", str(self.config)),
            *("--node", "0", "--run", "clients", "--folder", str(self.folder)),
            cwd=REPOSITORY,
        )
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]
        up, ended = asyncio.create_task(self.wait_for(HandsUp)), asyncio.create_task(self.process.wait())
        await asyncio.wait({up, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not up.done():
            up.cancel()
            raise AssertionError("the hands ended before they were up")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.link.post("hands/0", Stop(reason="test is over"))
            async with asyncio.timeout(8):
                await self.process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.link.close()

    def start(self, rollout: str, task: Path = HELLO) -> None:
        """Order one rollout."""
        self.link.post(
            "hands/0", StartAgent(rollout=rollout, task=str(task), harness="", api_key=f"key-{rollout}", model="tiny")
        )

    def of(self, kind: type[Message], rollout: str | None = None) -> list[Message]:
        """What was told of one kind so far, of one rollout or all."""
        return [m for m in self.told if isinstance(m, kind) and rollout in (None, getattr(m, "rollout", None))]

    async def wait_for(
        self, kind: type[Message], *, rollout: str | None = None, count: int = 1, seconds: float = 60.0
    ) -> list[Message]:
        """Until `count` messages of the kind have come."""
        async with asyncio.timeout(seconds):
            while len(found := self.of(kind, rollout)) < count:
                self._changed.clear()
                await self._changed.wait()
        return found

    async def _beat(self) -> None:
        while True:
            if not self.silent:
                self.link.post("hands/0", Heartbeat(source="front", doing="test", since_s=0.0))
            await asyncio.sleep(0.5)

    async def _receive(self) -> None:
        while True:
            identity, message = await self.link.recv()
            match message:
                case ModelCall():
                    self._answer(identity, message)
                case HandsUp() | HandsFailed() | AgentStarted() | AgentEnded() | Graded():
                    self.told.append(message)
            self._changed.set()

    def _answer(self, identity: str, call: ModelCall) -> None:
        self.calls.append(call)
        turn = self._turns.get(call.rollout, 0)
        self._turns[call.rollout] = turn + 1
        message = {"role": "assistant", "content": self._script(call.rollout, turn)}
        answer = {
            "id": call.call,
            "object": "chat.completion",
            "created": 1,
            "model": "tiny",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        headers = {"content-type": "application/json"}
        reply = ModelAnswer(call=call.call, status=200, headers=headers, chunks=[json.dumps(answer).encode()])
        self.link.post(identity, reply)
