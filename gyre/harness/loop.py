"""Our own minimal harness, for tests: `loop_agent.py` as a plain process inside the sandbox.

It needs nothing but a Python, which is made visible read-only, and starts in tens of milliseconds.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from gyre.errors import DeadlineError, SandboxError
from gyre.harness.harness import DETAIL_CHARS, AgentExit, AgentRequest
from gyre.sandbox.sandbox import Sandbox
from gyre.types import EndReason

PROGRAM = Path(__file__).resolve().with_name("loop_agent.py")
SYSTEM = "Use one shell command per turn."
STEP_LIMIT, COMMAND_S, OUTPUT_CHARS = 4, 5.0, 60


class LoopHarness:
    """Runs loop_agent.py."""

    def __init__(self) -> None:
        base = Path(sys.base_prefix).resolve()
        self._python = str(base / "bin" / f"python3.{sys.version_info.minor}")
        self.read_only = (PROGRAM,) if base.is_relative_to("/usr") else (base, PROGRAM)

    async def start(self) -> None:
        """Nothing to make ready."""

    async def run(self, request: AgentRequest, sandbox: Sandbox, started: Callable[[], None]) -> AgentExit:
        """Run the loop until it ends or the deadline comes."""
        config = {
            "base_url": request.base_url,
            "api_key": request.api_key,
            "model": request.model,
            "task": request.instruction,
            "system": SYSTEM,
            "step_limit": STEP_LIMIT,
            "timeout_s": COMMAND_S,
            "output_chars": OUTPUT_CHARS,
        }
        argv = [self._python, "-I", "-S", str(PROGRAM), json.dumps(config)]
        started()
        try:
            done = await sandbox.exec(argv, deadline_s=request.deadline_s, cwd=request.workdir, env=request.env)
        except DeadlineError:
            return AgentExit(end=EndReason.TIME_LIMIT, detail=f"{request.deadline_s:g} s")
        except SandboxError as error:
            return AgentExit(end=EndReason.START_FAILED, detail=str(error)[:DETAIL_CHARS])
        try:
            last = json.loads(done.stdout)
        except ValueError:
            words = f"rc={done.rc} {done.stderr[-300:].decode(errors='replace')}"
            return AgentExit(end=EndReason.HARNESS_ERROR, detail=words)
        end = EndReason.DONE if last["status"] == "end" else EndReason.HARNESS_ERROR
        return AgentExit(end=end, detail=str(last["detail"])[:DETAIL_CHARS])

    async def close(self, deadline_s: float) -> None:
        """Nothing to end."""
