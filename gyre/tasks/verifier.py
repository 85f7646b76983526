"""Grading: a snapshot of the workspace is unpacked in a fresh sandbox and the task's own test.sh gives the score.

The agent's processes are gone and its files were packed before; nothing of it runs until test.sh chooses to.
The snapshot is unpacked as the sandbox's user into the workspace; only then are /tests (root's, read-only to
the user) and an empty /logs/verifier made, so a planted link or reward leads nowhere. The exit status of
test.sh is ignored, as Harbor does. What test.sh itself lets candidate code do is the task author's care.

A reward that is missing, not a number, not finite or outside [0, 1] is an EvaluationError, never a zero.
"""

import io
import json
import math
import tarfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from gyre.errors import DeadlineError, EvaluationError, SandboxError
from gyre.sandbox.sandbox import Sandbox
from gyre.sandbox.spec import AGENT, ROOT, Limits, SandboxSpec
from gyre.tasks.harbor import Task
from gyre.types import Score

REWARD_BYTES = 1 << 16
MakeSandbox = Callable[[SandboxSpec], Awaitable[Sandbox]]


def spec_for(task: Task, base: SandboxSpec) -> SandboxSpec:
    """`base` with the task's workspace, environment and limits; a task may ask for less than the base, not for more."""
    limits = Limits(
        memory_mb=min(task.memory_mb or base.limits.memory_mb, base.limits.memory_mb),
        disk_mb=min(task.storage_mb or base.limits.disk_mb, base.limits.disk_mb),
        processes=base.limits.processes,
        cpu_s=base.limits.cpu_s,
    )
    return replace(base, workdir=task.workdir, limits=limits, env=base.env | task.env)


def pack_folder(folder: Path) -> bytes:
    """A tar archive of a folder's content with plain owners; empty where there is no folder."""
    if not folder.is_dir():
        return b""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, arcname=path.name, filter=_plain)
    return buffer.getvalue()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


async def prepare(task: Task, sandbox: Sandbox, *, environment: bytes) -> None:
    """Put the packed environment folder into the workspace."""
    if environment:
        await sandbox.push(environment, task.workdir)


async def grade(
    task: Task, snapshot: bytes | None, make_sandbox: MakeSandbox, *, base: SandboxSpec, tests: bytes | None = None
) -> Score:
    """The score of a snapshot (None: of the untouched environment), from a sandbox made and closed here.

    `tests` is the packed tests folder, where the caller has it. Raises EvaluationError.
    """
    try:
        sandbox = await make_sandbox(spec_for(task, base))
    except (SandboxError, DeadlineError) as error:
        raise EvaluationError(f"{task.name}: {error}") from error
    try:
        await prepare(task, sandbox, environment=pack_folder(task.environment) if snapshot is None else snapshot)
        await sandbox.folder("/tests", user=ROOT)
        await sandbox.folder("/logs/verifier", user=AGENT)
        await sandbox.push(pack_folder(task.tests) if tests is None else tests, "/tests", user=ROOT)
        done = await sandbox.exec(
            ["/bin/sh", "-c", 'test -x "$1" && exec "$1"; exec sh "$1"', "sh", "/tests/test.sh"],
            deadline_s=task.verifier_s,
            env=task.verifier_env,
            output_bytes=4000,
        )
        words = (done.stdout + done.stderr)[-500:].decode(errors="replace").strip()
        # Harbor's order: the JSON form first.
        as_json = await sandbox.read("/logs/verifier/reward.json", max_bytes=REWARD_BYTES)
        as_text = await sandbox.read("/logs/verifier/reward.txt", max_bytes=REWARD_BYTES) if as_json is None else None
    except (SandboxError, DeadlineError) as error:
        raise EvaluationError(f"{task.name}: {error}") from error
    finally:
        await sandbox.close()
    if as_json is not None:
        return read_reward_json(as_json)
    if as_text is not None:
        return Score(reward=_in_range(as_text.decode(errors="replace").strip(), "reward.txt"))
    raise EvaluationError(f"{task.name}: test.sh wrote no reward; rc={done.rc} {words}")


def read_reward_json(data: bytes) -> Score:
    """`{"reward": r, name: number, ...}`; a lone key of another name is the reward too.

    Several checks without a "reward" are refused: their mean is nobody's definition. EvaluationError.
    """
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EvaluationError(f"reward.json: {error}") from error
    if not isinstance(fields, dict) or not fields:
        raise EvaluationError("reward.json: wanted an object of numbers")
    checks = {str(name): _number(value, f"reward.json: {name}") for name, value in fields.items()}
    if "reward" in checks:
        return Score(reward=_in_range(checks.pop("reward"), "reward.json: reward"), checks=checks)
    if len(checks) == 1:
        return Score(reward=_in_range(next(iter(checks.values())), "reward.json"), checks=checks)
    raise EvaluationError(f"reward.json: several checks ({', '.join(checks)}) and no 'reward'")


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise EvaluationError(f"{where}: wanted a number, given {value!r}")
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise EvaluationError(f"{where}: wanted a number, given {value!r}") from error
    if not math.isfinite(number) or (isinstance(value, str) and where.startswith("reward.json")):
        raise EvaluationError(f"{where}: wanted a finite number, given {value!r}")
    return number


def _in_range(value: object, where: str) -> float:
    number = _number(value, where)
    if not 0.0 <= number <= 1.0:
        raise EvaluationError(f"{where}: wanted a reward in [0, 1], given {value!r}")
    return number


async def nop(task: Task, make_sandbox: MakeSandbox, *, base: SandboxSpec) -> Score:
    """The score of doing nothing."""
    return await grade(task, None, make_sandbox, base=base)


async def oracle(task: Task, make_sandbox: MakeSandbox, *, base: SandboxSpec) -> Score:
    """The score of the task's own solution."""
    spec = spec_for(task, base)
    sandbox = await make_sandbox(spec)
    try:
        await prepare(task, sandbox, environment=pack_folder(task.environment))
        await sandbox.folder("/solution", user=ROOT)
        await sandbox.push(pack_folder(task.solution), "/solution", user=ROOT)
        await sandbox.exec(["/bin/sh", "/solution/solve.sh"], deadline_s=task.agent_s, env=task.solution_env)
        await sandbox.reap()
        snapshot = await sandbox.pull(task.workdir, max_bytes=2 * spec.limits.disk_mb << 20)
    finally:
        await sandbox.close()
    return await grade(task, snapshot, make_sandbox, base=base)
