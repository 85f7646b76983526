"""Runs an agent that is a command-line program, headless, as one process inside its sandbox.

The program is installed on the node (`install.py`) and visible read-only; its home is a folder of the
sandbox's own temporary file system, filled with the configuration it is given. Each program is one file that
says how it is started and how its end is read. These programs reserve address space by the gigabyte, so
their memory is bound by what they make writable (RLIMIT_DATA), and so is that of the commands they start.
"""

import io
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gyre.errors import DeadlineError, SandboxError
from gyre.harness.harness import DETAIL_CHARS, AgentExit, AgentRequest
from gyre.harness.install import NpmProgram
from gyre.sandbox.sandbox import Sandbox
from gyre.sandbox.spec import AGENT, ExecResult
from gyre.types import EndReason

HOME = "/tmp/home"
OWN_THREADS = 128
"""Threads that the program itself may have beside the sandbox's own processes (the kernel counts both)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWindow:
    """What a program must know of the policy to compact in time: tokens of the context and of one turn."""

    context_tokens: int
    turn_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CliCommand:
    """How it is started. `files` lie below HOME; `env` is added to the sandbox's; `stdin` is the instruction."""

    argv: list[str]
    env: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""


class CliProgram(Protocol):
    """One program."""

    npm: NpmProgram
    memory_mb: int
    """What the program itself needs; a larger limit of the sandbox holds."""

    def command(self, request: AgentRequest, window: ModelWindow) -> CliCommand:
        """How to start it on `request`."""
        ...

    def judge(self, result: ExecResult) -> AgentExit:
        """How it ended by its own word."""
        ...


class CliHarness:
    """One program on one node."""

    def __init__(self, program: CliProgram, window: ModelWindow) -> None:
        self._program, self._window = program, window
        self.read_only: tuple[Path, ...] = (program.npm.folder,)

    async def start(self) -> None:
        """Look whether it is installed."""
        self._program.npm.require()

    async def run(self, request: AgentRequest, sandbox: Sandbox, started: Callable[[], None]) -> AgentExit:
        """Run it until it ends or the deadline comes."""
        command = self._program.command(request, self._window)
        try:
            await sandbox.folder(HOME, user=AGENT)
            await sandbox.push(_archive(command.files), HOME)
            started()
            result = await sandbox.exec(
                command.argv,
                deadline_s=request.deadline_s,
                cwd=request.workdir,
                env=home_env() | dict(command.env) | request.env,
                stdin=command.stdin,
                rlimits=self._limits(sandbox),
            )
        except DeadlineError:
            return AgentExit(end=EndReason.TIME_LIMIT, detail=f"{request.deadline_s:g} s")
        except SandboxError as error:
            return AgentExit(end=EndReason.START_FAILED, detail=str(error)[:DETAIL_CHARS])
        return self._program.judge(result)

    async def close(self, deadline_s: float) -> None:
        """Nothing to end."""

    def _limits(self, sandbox: Sandbox) -> dict[str, int]:
        limits = sandbox.rlimits()
        limits["data_bytes"] = max(limits.pop("memory_bytes"), self._program.memory_mb << 20)
        if "processes" in limits:
            limits["processes"] += OWN_THREADS
        return limits


def home_env() -> dict[str, str]:
    """A home of its own, and nothing found outside it."""
    return {
        "HOME": HOME,
        "TMPDIR": "/tmp",
        "XDG_CONFIG_HOME": f"{HOME}/.config",
        "XDG_DATA_HOME": f"{HOME}/.local/share",
        "XDG_STATE_HOME": f"{HOME}/.local/state",
        "XDG_CACHE_HOME": f"{HOME}/.cache",
        "TERM": "dumb",
        "NO_COLOR": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }


def last_words(result: ExecResult) -> str:
    """The end of what it said, errors first."""
    said = result.stderr.strip() or result.stdout.strip()
    return f"rc={result.rc} {said[-DETAIL_CHARS + 20 :].decode(errors='replace')}"


def _archive(files: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data := text.encode()), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
