"""Claude Code 2.1.332 and 2.1.220 (Anthropic Messages, streamed), the native program.

Marks: a sub-agent's calls carry the header x-claude-code-agent-id; compaction is the same conversation with
one more block of text; a title call has no tools. It ends by itself with one JSON line whose `is_error` is
right, also for streams that broke. A prompt above the window must be refused as `prompt is too long`: then
it compacts; it compacts by itself near CLAUDE_CODE_AUTO_COMPACT_WINDOW.
"""

import json

from gyre.harness.cli import HOME, CliCommand, ModelWindow, last_words
from gyre.harness.harness import DETAIL_CHARS, AgentExit, AgentRequest
from gyre.harness.install import NpmProgram
from gyre.sandbox.spec import ExecResult
from gyre.types import EndReason

VERSION, OLDER = "2.1.332", "2.1.220"


class ClaudeCode:
    """How Claude Code is started and read."""

    memory_mb = 4096

    def __init__(self, version: str = VERSION) -> None:
        self.npm = NpmProgram(
            name="claude-code",
            version=version,
            packages=(f"@anthropic-ai/claude-code-linux-{{arch}}@{version}",),
            program="@anthropic-ai/claude-code-linux-{arch}/claude",
        )

    def command(self, request: AgentRequest, window: ModelWindow) -> CliCommand:
        """`claude -p`, every model name served by the one policy."""
        model = request.model
        return CliCommand(
            argv=[
                *(str(self.npm.require()), "--print", "--output-format", "json", "--model", model),
                "--dangerously-skip-permissions",
            ],
            env={
                "ANTHROPIC_BASE_URL": request.base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": request.api_key,
                "ANTHROPIC_DEFAULT_OPUS_MODEL": model,
                "ANTHROPIC_DEFAULT_SONNET_MODEL": model,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
                "CLAUDE_CODE_SUBAGENT_MODEL": model,
                "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(window.turn_tokens),
                "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(window.context_tokens),
                # The attribution line differs from conversation to conversation: prefixes could not be shared.
                "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "CLAUDE_CODE_TMPDIR": "/tmp",
                "CLAUDE_CONFIG_DIR": f"{HOME}/.claude",
                "DISABLE_AUTOUPDATER": "1",
                "DISABLE_TELEMETRY": "1",
                "DISABLE_ERROR_REPORTING": "1",
                "API_TIMEOUT_MS": "86400000",
            },
            stdin=request.instruction.encode(),
        )

    def judge(self, result: ExecResult) -> AgentExit:
        """The result line; without one it broke."""
        try:
            last = json.loads(result.stdout.strip().rpartition(b"\n")[2])
            is_error, words = bool(last["is_error"]), f"{last['subtype']}: {last.get('result', '')}"
        except (ValueError, KeyError, TypeError):
            return AgentExit(end=EndReason.HARNESS_ERROR, detail=last_words(result))
        end = EndReason.HARNESS_ERROR if is_error or result.rc else EndReason.DONE
        return AgentExit(end=end, detail=words[:DETAIL_CHARS])
