"""The hands with real harnesses in real sandboxes, against a front that plays a scripted model."""

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from gyre.sandbox.lease import Process
from gyre.wire.messages import AgentEnded, AgentStarted, Graded, HandsFailed, StopAgent
from tests.clients.fake_front import HELLO, SUBMIT, FakeFront, fence

MINI, LOOP = "mini-swe-agent", "loop"


def writes_hello(rollout: str, turn: int) -> str:
    """A good policy."""
    return fence("echo HELLO > greeting.txt") if turn == 0 else SUBMIT


def task_with(folder: Path, old: str, new: str) -> Path:
    """A copy of the hello task with one change in its task.toml."""
    shutil.copytree(HELLO, folder)
    text = (folder / "task.toml").read_text()
    assert old in text
    (folder / "task.toml").write_text(text.replace(old, new, 1))
    return folder


def leftovers(folder: Path) -> list[Path]:
    """Leases below the temp root."""
    return list(folder.glob("gyre-*"))


@pytest.mark.parametrize("harness", [MINI, LOOP])
def test_a_harness_completes_a_task_and_is_graded(tmp_path: Path, harness: str) -> None:
    async def run() -> None:
        async with FakeFront(tmp_path, writes_hello, harness=harness) as front:
            for index in range(6):
                front.start(f"0.{index}")
            graded = await front.wait_for(Graded, count=6)
            assert {(one.reward, one.error, one.tries) for one in graded} == {(1.0, "", 1)}
            assert graded[0].checks == {"file": 1.0, "text": 1.0, "clean": 1.0}
            assert {(one.end, one.detail) for one in front.of(AgentEnded)} == {("done", "Submitted")}
            first = json.loads(next(call.body for call in front.calls if call.rollout == "0.0"))["messages"]
            instruction = (HELLO / "instruction.md").read_text()
            assert [(one["role"], one["content"].strip()) for one in first] == [
                ("system", "Use one shell command per turn."),
                ("user", instruction.strip()),
            ]
            assert all(call.headers["authorization"] == f"Bearer key-{call.rollout}" for call in front.calls)

    asyncio.run(run())
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("harness", [MINI, LOOP])
def test_whatever_the_policy_says_the_harness_goes_on(tmp_path: Path, harness: str) -> None:
    said = ("no fence", fence("echo \x00\x01 \ud7ff > a"), fence("printf '\\377\\000'; exit 3"), "```sh\n```")

    async def run() -> None:
        async with FakeFront(tmp_path, lambda _, turn: said[turn % 4], harness=harness) as front:
            front.start("0.0")
            await front.wait_for(Graded, rollout="0.0")
            (ended,) = front.of(AgentEnded)
            assert (ended.end, ended.detail) == ("done", "LimitsExceeded")
            assert len(front.calls) == 4

    asyncio.run(run())


@pytest.mark.parametrize("harness", [MINI, LOOP])
def test_a_time_limit_is_graded_for_what_is_there(tmp_path: Path, harness: str) -> None:
    task = task_with(tmp_path / "short", "timeout_sec = 20.0", "timeout_sec = 1.5")
    said = (fence("echo almost > greeting.txt"), fence("(setsid sleep 500 &); sleep 100"))

    async def run() -> None:
        async with FakeFront(tmp_path, lambda _, turn: said[min(turn, 1)], harness=harness) as front:
            front.start("0.0", task)
            (graded,) = await front.wait_for(Graded, rollout="0.0")
            assert front.of(AgentEnded)[0].end == "time_limit"
            assert graded.reward == 0.5 and graded.checks["file"] == 1.0

    asyncio.run(run())


def test_a_task_that_cannot_start_is_told_with_the_reason(tmp_path: Path) -> None:
    task = task_with(tmp_path / "gpu", "[environment]", "[environment]\ngpus = 1")

    async def run() -> None:
        async with FakeFront(tmp_path, writes_hello, harness=LOOP) as front:
            front.start("0.0", task)
            (graded,) = await front.wait_for(Graded, rollout="0.0")
            (ended,) = front.of(AgentEnded)
            assert ended.end == "start_failed" and "environment.gpus" in ended.detail
            assert (graded.reward, graded.tries) == (0.0, 0)

    asyncio.run(run())


def test_failed_grading_is_retried_and_never_zero_without_error(tmp_path: Path) -> None:
    task = task_with(tmp_path / "broken", 'workdir = "/app"', 'workdir = "/app"')
    (task / "tests" / "test.sh").write_text("#!/bin/sh\necho 7 > /logs/verifier/reward.txt\n")

    async def run() -> None:
        async with FakeFront(tmp_path, writes_hello, harness=LOOP) as front:
            front.start("0.0", task)
            (graded,) = await front.wait_for(Graded, rollout="0.0")
            assert graded.tries == 3 and "[0, 1]" in graded.error

    asyncio.run(run())


def test_hands_end_when_the_front_is_silent(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeFront(tmp_path, lambda *_: fence("sleep 100"), harness=LOOP, alone_s=1.5) as front:
            front.start("0.0")
            await front.wait_for(AgentStarted)
            front.silent = True
            async with asyncio.timeout(8):
                await front.process.wait()

    asyncio.run(run())
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_sandbox_outlives_its_hands(tmp_path: Path, number: signal.Signals) -> None:
    async def run() -> None:
        async with FakeFront(tmp_path, lambda *_: fence("sleep 100"), harness=MINI) as front:
            for index in range(4):
                front.start(f"0.{index}")
            await front.wait_for(AgentStarted, count=4)
            inside = [json.loads(path.read_text())["inside"] for path in tmp_path.glob("gyre-*/*/lease.json")]
            assert len(inside) == 4
            os.kill(front.process.pid, number)
            async with asyncio.timeout(5):
                await front.process.wait()
                while any(Process(**one).is_alive() for one in inside):
                    await asyncio.sleep(0.02)

    asyncio.run(run())
    assert number is signal.SIGKILL or leftovers(tmp_path) == []


def test_hands_without_a_harness_say_so_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYRE_HARNESS_PYTHON", str(tmp_path / "missing"))

    async def run() -> None:
        async with FakeFront(tmp_path, writes_hello, harness=MINI) as front:
            (failed,) = await front.wait_for(HandsFailed)
            assert "GYRE_HARNESS_PYTHON" in failed.reason
            async with asyncio.timeout(8):
                assert await front.process.wait() == 1

    asyncio.run(run())


def test_a_stopped_agent_is_not_graded(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeFront(tmp_path, lambda *_: fence("sleep 100"), harness=LOOP) as front:
            front.start("0.0")
            await front.wait_for(AgentStarted)
            front.link.post("hands/0", StopAgent(rollout="0.0"))
            async with asyncio.timeout(8):
                while leftovers(tmp_path):
                    await asyncio.sleep(0.02)
            front.start("0.1", HELLO)
            await front.wait_for(AgentStarted, rollout="0.1")
            assert front.of(Graded) == []

    asyncio.run(run())
