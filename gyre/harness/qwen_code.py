"""Qwen Code 0.24.4 (Chat Completions, streamed), on a Node of its own.

Marks: none in its headers; sub-agents and compaction show by structure alone. It reads its instruction from
stdin and ends by itself with 0. A stream that broke looks like success to it, so an end right after a failed
call is read as an error by the hands, who saw the call. Arguments it cannot parse make it ask again with
max_tokens 64000; then it repairs and runs them.
"""

import json

from gyre.harness.cli import CliCommand, ModelWindow, last_words
from gyre.harness.harness import AgentExit, AgentRequest
from gyre.harness.install import NpmProgram
from gyre.sandbox.spec import ExecResult
from gyre.types import EndReason

NODE = "node-linux-{arch}/bin/node"
SETTINGS = {
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False, "checkpointing": {"enabled": False}},
    "telemetry": {"enabled": False},
    "privacy": {"usageStatisticsEnabled": False},
    "security": {"auth": {"selectedType": "openai"}},
    "tools": {"approvalMode": "yolo"},
    "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
}


class QwenCode:
    """How Qwen Code is started and read."""

    npm = NpmProgram(
        name="qwen-code",
        version="0.24.4",
        packages=("@qwen-code/qwen-code@0.24.4", "node-linux-{arch}@22.23.5"),
        program="@qwen-code/qwen-code/cli-entry.js",
        executables=("@qwen-code/qwen-code/vendor/ripgrep/{arch}-linux/rg",),
    )
    memory_mb = 2048

    def command(self, request: AgentRequest, window: ModelWindow) -> CliCommand:
        """`qwen -y`, the endpoint by environment, the window by settings."""
        model = {
            "name": request.model,
            "skipStartupContext": False,
            "generationConfig": {"contextWindowSize": window.context_tokens, "timeout": 86_400_000},
        }
        return CliCommand(
            argv=[
                *(str(self.npm.path(NODE)), str(self.npm.require())),
                *("--yolo", "--output-format", "text", "--auth-type", "openai", "--model", request.model),
            ],
            env={
                "OPENAI_BASE_URL": request.base_url,
                "OPENAI_API_KEY": request.api_key,
                "OPENAI_MODEL": request.model,
                "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
                "QWEN_CODE_MAX_OUTPUT_TOKENS": str(window.turn_tokens),
            },
            files={".qwen/settings.json": json.dumps(SETTINGS | {"model": model})},
            stdin=request.instruction.encode(),
        )

    def judge(self, result: ExecResult) -> AgentExit:
        """Its exit status."""
        end = EndReason.DONE if result.rc == 0 else EndReason.HARNESS_ERROR
        return AgentExit(end=end, detail=last_words(result))
