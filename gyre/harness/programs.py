"""The command-line programs by the name that settings and launch/harnesses.sh know them by."""

from gyre.config.choices import HarnessName
from gyre.harness import claude_code
from gyre.harness.claude_code import ClaudeCode
from gyre.harness.cli import CliProgram
from gyre.harness.codex import Codex
from gyre.harness.opencode import OpenCode
from gyre.harness.qwen_code import QwenCode

PROGRAMS: dict[str, CliProgram] = {
    HarnessName.CLAUDE_CODE.value: ClaudeCode(),
    HarnessName.CLAUDE_CODE_OLDER.value: ClaudeCode(claude_code.OLDER),
    HarnessName.CODEX.value: Codex(),
    HarnessName.QWEN_CODE.value: QwenCode(),
    HarnessName.OPENCODE.value: OpenCode(),
}
