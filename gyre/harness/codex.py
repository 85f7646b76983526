"""Codex 0.171.0 (OpenAI Responses, streamed), the native program.

Marks: the headers thread-id and x-codex-parent-thread-id; a compaction is a request without tools whose
request_kind says so. History comes back byte-exact. It ends by itself, with a status other than 0 when its
turn failed: a broken stream is tried again and then fails the turn. A cut turn (max_output_tokens) fails it too.
"""

import json

from gyre.harness.cli import HOME, CliCommand, ModelWindow, last_words
from gyre.harness.harness import AgentExit, AgentRequest
from gyre.harness.install import NpmProgram
from gyre.sandbox.spec import ExecResult
from gyre.types import EndReason

COMPACT_AT = 0.9
"""Part of the window after which it compacts."""

CONFIG = """
model = {model}
model_provider = "gyre"
model_context_window = {context}
model_auto_compact_token_limit = {compact}
check_for_update_on_startup = false
[model_providers.gyre]
name = "gyre"
base_url = {base_url}
env_key = "GYRE_API_KEY"
wire_api = "responses"
stream_idle_timeout_ms = 86400000
[analytics]
enabled = false
"""


class Codex:
    """How Codex is started and read."""

    npm = NpmProgram(
        name="codex",
        version="0.171.0",
        packages=("@openai/codex@0.171.0-linux-{arch}",),
        program="@openai/codex/vendor/{machine}-unknown-linux-musl/bin/codex",
    )
    memory_mb = 1024

    def command(self, request: AgentRequest, window: ModelWindow) -> CliCommand:
        """`codex exec`, without its own sandbox: it is in one."""
        config = CONFIG.format(
            model=json.dumps(request.model),
            context=window.context_tokens,
            compact=int(COMPACT_AT * window.context_tokens),
            base_url=json.dumps(request.base_url),
        )
        return CliCommand(
            argv=[
                *(str(self.npm.require()), "exec", "--dangerously-bypass-approvals-and-sandbox"),
                *("--skip-git-repo-check", "--color", "never", "-"),
            ],
            env={"GYRE_API_KEY": request.api_key, "CODEX_HOME": f"{HOME}/.codex"},
            files={".codex/config.toml": config},
            stdin=request.instruction.encode(),
        )

    def judge(self, result: ExecResult) -> AgentExit:
        """Its exit status."""
        end = EndReason.DONE if result.rc == 0 else EndReason.HARNESS_ERROR
        return AgentExit(end=end, detail=last_words(result))
