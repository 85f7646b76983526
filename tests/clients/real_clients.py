"""Scenarios that every real harness is run through, each with its own words for the same acts."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from gyre.wire.messages import AgentEnded, Graded
from tests.clients.fake_front import HELLO
from tests.clients.scripted_front import Policy, ScriptedFront, Served, finished, require

AGENT_S = 100.0
ROLLOUT = "0.0"


def patient(folder: Path) -> Path:
    """The hello task with time for a program that starts slowly on a busy machine."""
    shutil.copytree(HELLO, folder)
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(text.replace("timeout_sec = 20.0", f"timeout_sec = {AGENT_S}", 1))
    return folder


def run(
    folder: Path,
    harness: str,
    policy: Policy,
    check: Callable[[Served, AgentEnded, Graded], None],
    *,
    context_tokens: int = 200_000,
    turn_tokens: int = 8000,
) -> None:
    """One rollout of the hello task, from its start to its score, then `check`."""
    require(harness)

    async def main() -> None:
        front = ScriptedFront(folder, policy, harness=harness, context_tokens=context_tokens, turn_tokens=turn_tokens)
        async with front:
            front.start(ROLLOUT, patient(folder / "task"))
            ended, graded = await finished(front, ROLLOUT, AGENT_S + 30)
            check(front.served[ROLLOUT], ended, graded)

    asyncio.run(main())
    assert list(folder.glob("gyre-*")) == []
