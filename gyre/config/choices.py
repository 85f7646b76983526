"""The closed choices that settings may take.

Each is a StrEnum whose members compare equal to their TOML text, so that code may `match` on either. A choice
that is listed here is one that the program can act upon: what is not built is not offered.
"""

from enum import StrEnum


class ReasoningHistory(StrEnum):
    """Whether the reasoning of earlier turns stays in the prompt, or the chat template decides."""

    KEEP = "keep"
    TEMPLATE = "template"


class ToolParserName(StrEnum):
    """How tool calls are written in the policy's text; `auto` looks at the chat template."""

    AUTO = "auto"
    HERMES = "hermes"
    NONE = "none"


class ReasoningParserName(StrEnum):
    """How reasoning is written in the policy's text; `auto` looks at the chat template."""

    AUTO = "auto"
    THINK = "think"
    NONE = "none"


class DeviceChoice(StrEnum):
    """Where ranks compute; `auto` takes CUDA where it is and the CPU elsewhere."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Number format of the engine's weights; `auto` keeps that of the checkpoint."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Objective(StrEnum):
    """The loss; the formulas are in algo/objective.py."""

    GSPO = "gspo"
    GSPO_PATH = "gspo_path"
    GRPO = "grpo"
    DR_GRPO = "dr_grpo"
    DAPO = "dapo"
    CISPO = "cispo"
    REINFORCE = "reinforce"
    PPO = "ppo"


class Importance(StrEnum):
    """What the ratio is taken against: the policy that sampled, or the step's own with a truncated correction."""

    BEHAVIOR = "behavior"
    TRUNCATED = "truncated"


class MixedVersions(StrEnum):
    """What is done with tokens of older versions in a rollout that several versions sampled."""

    KEEP = "keep"
    CORRECT = "correct"
    MASK = "mask"


class GroupFilter(StrEnum):
    """Which groups count in a batch; `informative` leaves out those whose rewards are all equal (DAPO)."""

    NONE = "none"
    INFORMATIVE = "informative"


class AdvantageScale(StrEnum):
    """What a group's centred rewards are divided by."""

    STD = "std"
    NONE = "none"


class PolicyName(StrEnum):
    """The rule by which cells leave rollout and come back.

    Those that a real run cannot act upon yet (`is_simulated_only`) are refused by `check_runnable`.
    """

    WATERLEVEL = "waterlevel"
    """The published rule: a cell leaves while the others cover the unfinished rollouts."""
    COLOCATE = "colocate"
    """The whole pool switches when a batch is complete; fixed shares of the batch."""
    COLOCATE_STREAMING = "colocate-streaming"
    """The same, and cells claim micro-steps one by one."""
    ASYNC = "async"
    """A fixed split; training starts when a batch is complete, in fixed shares."""
    ASYNC_STREAMING = "async-streaming"
    """The same split; micro-steps are trained as groups become ready."""
    JUST_IN_TIME = "just-in-time"
    """Training gets the cells that finish it when the batch's last rollout ends; starved cells go back."""
    JUST_IN_TIME_HISTORY = "just-in-time-history"
    """The same, with the lengths of earlier rollouts of a task: long groups start first."""

    @property
    def is_simulated_only(self) -> bool:
        """Whether only the simulator acts upon it.

        Fixed shares would need a queue that waits for the whole batch; leaving a step in its middle needs the
        gradient so far to be handed over; a satellite that goes on to the next step needs role epochs with a step
        for each cell (today the core's epoch makes it join before its turn). None exists on the ranks.
        """
        return self not in (PolicyName.WATERLEVEL, PolicyName.COLOCATE_STREAMING)

    @property
    def is_async(self) -> bool:
        """Whether its cells never change sides."""
        return self in (PolicyName.ASYNC, PolicyName.ASYNC_STREAMING)

    @property
    def is_streaming(self) -> bool:
        """Whether micro-steps are claimed one by one as groups become ready."""
        return self not in (PolicyName.COLOCATE, PolicyName.ASYNC)


class PathRole(StrEnum):
    """What a leaf of a trajectory tree belongs to; the order of a setting says which is sampled first."""

    MAIN = "main"
    SUB_AGENT = "sub_agent"
    MAIN_SUMMARY = "main_summary"
    SUB_AGENT_SUMMARY = "sub_agent_summary"
    SIDE = "side"


class HarnessName(StrEnum):
    """The agent program that drives a rollout; `loop` is a minimal client for tests."""

    MINI_SWE_AGENT = "mini-swe-agent"
    CLAUDE_CODE = "claude-code"
    CLAUDE_CODE_OLDER = "claude-code-2.1.220"
    CODEX = "codex"
    QWEN_CODE = "qwen-code"
    OPENCODE = "opencode"
    LOOP = "loop"


class Dashboard(StrEnum):
    """How rank 0's terminal shows the run; `auto` is rich on a terminal and lines elsewhere."""

    AUTO = "auto"
    RICH = "rich"
    LINES = "lines"
    OFF = "off"


class LogLevel(StrEnum):
    """The least severe log line that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
