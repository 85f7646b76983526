"""mini-swe-agent, unmodified, from its own environment: forked a rollout at a time from a preloaded parent.

One parent a node (`mini_parent.py`). A child enters the sandbox's namespaces, takes the sandbox user's
identity and runs the agent there, so its commands run inside and its only network is the gateway socket.
The environment and its base interpreter are visible inside, read-only, for imports that come late. When the
parent dies, every running agent ends as a harness error and no new one starts.
"""

import array
import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre.errors import DeadlineError, SandboxError
from gyre.harness.harness import DETAIL_CHARS, AgentExit, AgentRequest
from gyre.sandbox.sandbox import Sandbox
from gyre.sandbox.spec import base_env
from gyre.types import EndReason

log = logging.getLogger(__name__)

PYTHON_VARIABLE = "GYRE_HARNESS_PYTHON"
READY_S = 120.0
FORK_S = 15.0
PACKET = 1 << 17
HERE = Path(__file__).resolve().parent
OWN_ENV = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # Or it is downloaded at import.
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": "/tmp",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
}
CONFIG = HERE.parents[1] / "configs" / "quickstart" / "mini.yaml"


def harness_python() -> Path:
    """The interpreter of the harness's environment: $GYRE_HARNESS_PYTHON, or the sibling environment `harness`."""
    named = os.environ.get(PYTHON_VARIABLE)
    path = Path(named) if named else Path(sys.prefix).parent / "harness" / "bin" / "python"
    if not path.exists():
        raise SandboxError(f"{path}: no such interpreter; {PYTHON_VARIABLE} names that of requirements-harness.txt")
    return path


class MiniSweAgent:
    """The preloaded parent and the agents that run. Create and use it inside one event loop."""

    def __init__(self, *, config: Path | None = None) -> None:
        self._python = harness_python()
        self._config = config or CONFIG
        homes = {self._python.absolute().parents[1], self._python.resolve().parents[1]}
        self.read_only = tuple(sorted(path for path in homes if not path.is_relative_to("/usr")))
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._waiting: dict[int, tuple[asyncio.Future[dict[str, Any]], asyncio.Future[dict[str, Any]]]] = {}
        self._next_id = 1

    async def start(self) -> None:
        """Start the parent and wait for its warm-up."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        rootless = "1" if os.geteuid() != 0 else "0"
        enter = HERE.parent / "sandbox" / "enter.py"
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp"} | OWN_ENV
        program = [str(self._python), str(HERE / "mini_parent.py")]
        self._process = subprocess.Popen(
            [*program, str(theirs.fileno()), str(enter), str(self._config), rootless],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=env,
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._waiting[0] = (ready, loop.create_future())
        loop.add_reader(self._sock.fileno(), self._receive)
        try:
            hello = await asyncio.wait_for(ready, READY_S)
        except TimeoutError as error:
            raise DeadlineError("start of mini-swe-agent's parent", seconds=READY_S) from error
        finally:
            self._waiting.pop(0, None)
        log.info("harness=mini-swe-agent ready pid=%d idle_threads=%s", self._process.pid, hello.get("threads"))

    async def run(self, request: AgentRequest, sandbox: Sandbox, started: Callable[[], None]) -> AgentExit:
        """Fork one agent into the sandbox and wait for its end or the deadline."""
        if self._sock is None or self._sock.fileno() < 0:
            return AgentExit(end=EndReason.START_FAILED, detail="mini-swe-agent's parent is gone")
        loop = asyncio.get_running_loop()
        request_id, self._next_id = self._next_id, self._next_id + 1
        forked, ended = loop.create_future(), loop.create_future()
        self._waiting[request_id] = (forked, ended)
        try:
            self._send(request_id, request, sandbox)
            first = await asyncio.wait_for(forked, FORK_S)
            if "pid" not in first:
                return AgentExit(end=EndReason.START_FAILED, detail=first["detail"][:DETAIL_CHARS])
            started()
            last = await asyncio.wait_for(ended, request.deadline_s)
        except TimeoutError:
            if not forked.done():
                return AgentExit(end=EndReason.START_FAILED, detail=f"no fork within {FORK_S:g} s")
            return AgentExit(end=EndReason.TIME_LIMIT, detail=f"{request.deadline_s:g} s")
        except OSError as error:
            return AgentExit(end=EndReason.START_FAILED, detail=str(error))
        finally:
            self._waiting.pop(request_id, None)
        end = EndReason.DONE if last["status"] == "end" else EndReason.HARNESS_ERROR
        return AgentExit(end=end, detail=last["detail"][:DETAIL_CHARS])

    def _send(self, request_id: int, request: AgentRequest, sandbox: Sandbox) -> None:
        packet = {
            "id": request_id,
            "task": request.instruction,
            "base_url": request.base_url,
            "api_key": request.api_key,
            "model": request.model,
            "workdir": request.workdir,
            "env": base_env(sandbox.spec) | OWN_ENV | request.env,
            "uid": sandbox.uid,
            "limits": sandbox.rlimits(),
        }
        assert self._sock is not None
        data = json.dumps(packet).encode()
        if len(data) > PACKET:
            raise OSError(f"an instruction of {len(request.instruction)} characters is too long for the harness")
        self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sandbox.pidfd]))])

    def _receive(self) -> None:
        assert self._sock is not None
        while True:
            try:
                data = self._sock.recv(PACKET)
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            if not data:
                return self._gone()
            message = json.loads(data)
            if message["id"] in self._waiting:
                forked, ended = self._waiting[message["id"]]
                target = forked if not forked.done() else ended
                if not target.done():
                    target.set_result(message)

    def _gone(self) -> None:
        """The parent ended: everyone who waits is told."""
        assert self._sock is not None
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
        for forked, ended in self._waiting.values():
            for future in (forked, ended):
                if not future.done():
                    future.set_result({"status": "gone", "detail": "mini-swe-agent's parent is gone"})

    async def close(self, deadline_s: float) -> None:
        """End the parent; its children end with their sandboxes."""
        if self._process is None:
            return
        self._gone()
        end = asyncio.get_running_loop().time() + deadline_s
        while self._process.poll() is None:
            if asyncio.get_running_loop().time() > end:
                self._process.kill()
            await asyncio.sleep(0.01)
