"""What every harness is to the hands: something that runs one agent in a prepared sandbox until it ends.

A harness speaks to the policy through the endpoint it is given and knows no rollout, tree or token. How it
ended is told as an `AgentExit`; nothing it does raises, except that it could not be started at all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gyre.sandbox.sandbox import Sandbox
from gyre.types import EndReason, RolloutId

DETAIL_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """One agent to run. `base_url` ends in /v1; `deadline_s` counts from the start of the agent."""

    rollout: RolloutId
    instruction: str
    base_url: str
    api_key: str
    model: str
    workdir: str
    deadline_s: float
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentExit:
    """How it ended; `detail` is its own last word, cut."""

    end: EndReason
    detail: str = ""


class Harness(Protocol):
    """One kind of agent program on one node."""

    read_only: tuple[Path, ...]
    """Paths of the host that must be visible inside the sandbox."""

    async def start(self) -> None:
        """Make it ready for many rollouts. SandboxError or DeadlineError when that fails."""

    async def run(self, request: AgentRequest, sandbox: Sandbox, started: Callable[[], None]) -> AgentExit:
        """Run one agent; calls `started` once it runs. Its processes may be left: the caller reaps."""
        ...  # A protocol: what it returns is said by each harness.

    async def close(self, deadline_s: float) -> None:
        """End what `start` started, by force if it takes longer than the deadline."""
