"""OpenCode 1.18.33 (Chat Completions, streamed).

Marks: the headers x-session-id and x-parent-session-id; a title call comes first. It reads its instruction
from stdin and ends by itself with 0. A call it cannot parse comes back under the tool name `invalid`. A
dropped stream leaves an empty assistant message that nobody sampled.
"""

import json

from gyre.harness.cli import CliCommand, ModelWindow, last_words
from gyre.harness.harness import AgentExit, AgentRequest
from gyre.harness.install import NpmProgram
from gyre.sandbox.spec import ExecResult
from gyre.types import EndReason

PROVIDER = "gyre"


class OpenCode:
    """How OpenCode is started and read."""

    npm = NpmProgram(
        name="opencode",
        version="1.18.33",
        packages=("opencode-linux-{arch}@1.18.33",),
        program="opencode-linux-{arch}/bin/opencode",
    )
    memory_mb = 2048

    def command(self, request: AgentRequest, window: ModelWindow) -> CliCommand:
        """`opencode run`, with one provider that is the gateway."""
        limits = {"context": window.context_tokens, "output": window.turn_tokens}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": PROVIDER,
            "options": {"baseURL": request.base_url, "apiKey": request.api_key, "timeout": False},
            "models": {request.model: {"name": request.model, "limit": limits, "tool_call": True}},
        }
        config = {
            "provider": {PROVIDER: provider},
            "model": f"{PROVIDER}/{request.model}",
            "small_model": f"{PROVIDER}/{request.model}",
            "enabled_providers": [PROVIDER],
            "permission": "allow",
            "share": "disabled",
            "autoupdate": False,
        }
        return CliCommand(
            argv=[str(self.npm.require()), "run", "--model", f"{PROVIDER}/{request.model}"],
            env={
                "OPENCODE_CONFIG_CONTENT": json.dumps(config),
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
                "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
                "OPENCODE_DISABLE_SHARE": "1",
                "OPENCODE_PURE": "1",
            },
            stdin=request.instruction.encode(),
        )

    def judge(self, result: ExecResult) -> AgentExit:
        """Its exit status."""
        end = EndReason.DONE if result.rc == 0 else EndReason.HARNESS_ERROR
        return AgentExit(end=end, detail=last_words(result))
