"""The figures of a run, recomputed from its logs alone: summary.json and its text.

A resumed run has several lineages in one log: what was trained after the checkpoint that it went on from is
gone with its weights and does not count. What was sampled, switched and moved counts, whatever became of it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np

from gyre.store import records
from gyre.store.store import EVENTS, TOKENS, read_records, write_whole

COLUMNS = 80
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """See the field names; times in seconds, gaps in nats, rewards in [0, 1]. -1 for an evaluation not made."""

    name: str
    policy: str
    seed: int
    ended: str
    wall_s: float
    steps: int
    reward_per_step: list[float]
    eval_before: float
    eval_after: float
    rollouts: int
    rollouts_dropped: int
    harness_errors: int
    turns: int
    mean_turns: float
    tokens_sampled: int
    tokens_per_s: float
    tokens_trained: int
    tokens_shared: int
    retokenised_tokens: int
    max_logprob_gap: float
    staleness_mean: float
    clipped_rollouts: int
    switches_to_training: int
    switches_to_rollout: int
    mean_switch_to_training_s: float
    mean_switch_to_rollout_s: float
    moved_live_requests: int
    micro_steps_per_cell: list[int]
    troubles: list[str]


def summarize(folder: Path) -> Summary:
    """Read the logs of a run folder. Raises StoreError if they are damaged or there is no run."""
    tally = _Tally()
    for record in read_records(folder / EVENTS):
        tally.add(record)
    if (folder / TOKENS).exists():
        for record in read_records(folder / TOKENS):
            tally.add_turn(record)
    return tally.summary()


def write_summary(folder: Path) -> Summary:
    """Recompute, write summary.json, return it."""
    summary = summarize(folder)
    text = msgspec.json.format(msgspec.json.encode(asdict(summary)), indent=2)
    write_whole(folder / "summary.json", text + b"\n")
    return summary


class _Tally:
    """Sums over the records, in order."""

    def __init__(self) -> None:
        self.began: records.RunBegan | None = None
        self.ended, self.wall_s, self.last_time = "", 0.0, 0.0
        self.steps: dict[int, records.StepTrained] = {}
        self.evaluations: dict[str, float] = {}
        self.micro_steps: list[records.MicroStepTrained] = []
        self.switches: dict[str, list[float]] = {"training": [], "rollout": []}
        self.groups: dict[int, records.GroupReady] = {}
        self.states: dict[str, str] = {}
        self.harness_errors = self.moved = self.turns = self.tokens = 0
        self.retokenised: dict[str, int] = {}
        self.troubles: list[str] = []

    def add(self, record: records.Record) -> None:
        """One record of events.log."""
        match record:
            case records.RunBegan():
                self.began, self.ended = record, ""
                self.wall_s += self.last_time
                self.last_time = 0.0
                self._forget_from(record.resumed_version)
            case records.RunEnded():
                self.ended = record.reason
                self.last_time = record.wall_s
            case records.ScheduleEvent():
                self.last_time = max(self.last_time, record.now)
            case records.StepTrained():
                self.steps[record.step] = record
                self.last_time = max(self.last_time, record.time)
            case records.Evaluated():
                self.evaluations[record.name] = record.mean
            case records.MicroStepTrained():
                self.micro_steps.append(record)
            case records.Switched():
                self.switches[record.to].append(record.seconds)
            case records.GroupReady():
                self.groups[record.group] = record
            case records.RolloutChanged():
                self.states[record.rollout] = record.state
            case records.HarnessError():
                self.harness_errors += 1
            case records.LiveRequestMoved():
                self.moved += 1
            case records.Trouble():
                self.troubles.append(f"{record.level}: {record.text}")

    def _forget_from(self, step: int) -> None:
        """The run went on before `step`: later steps are not part of its weights."""
        self.steps = {key: value for key, value in self.steps.items() if key < step}
        self.micro_steps = [one for one in self.micro_steps if one.step < step]

    def add_turn(self, record: records.Record) -> None:
        """One record of tokens.log."""
        if isinstance(record, records.TurnDone):
            self.turns += 1
            self.tokens += len(record.output_tokens) // 4
            self.retokenised[record.rollout] = max(self.retokenised.get(record.rollout, 0), record.retokenised)

    def _trained_groups(self) -> list[records.GroupReady]:
        """The groups of the steps that were trained; a group that was ready for a later step is not among them."""
        per_batch = self.began.groups_per_batch if self.began else 0
        last = max(self.steps, default=-1)
        return [group for group in self.groups.values() if not per_batch or group.group < (last + 1) * per_batch]

    def summary(self) -> Summary:
        """All figures."""
        began, steps = self.began, [self.steps[step] for step in sorted(self.steps)]
        num_cells = began.num_cells if began else 0
        trained = self.micro_steps
        wall_s = self.wall_s + self.last_time
        groups = self._trained_groups()
        return Summary(
            name=began.name if began else "",
            policy=began.policy if began else "",
            seed=began.seed if began else 0,
            ended=self.ended,
            wall_s=round(wall_s, 3),
            steps=len(steps),
            reward_per_step=[round(step.reward_mean, 4) for step in steps],
            eval_before=round(self.evaluations.get("before", -1.0), 4),
            eval_after=round(self.evaluations.get("after", -1.0), 4),
            rollouts=len(self.states),
            rollouts_dropped=sum(state == "dropped" for state in self.states.values()),
            harness_errors=self.harness_errors,
            turns=self.turns,
            mean_turns=round(self.turns / len(self.retokenised), 2) if self.retokenised else 0.0,
            tokens_sampled=self.tokens,
            tokens_per_s=round(self.tokens / wall_s, 1) if wall_s else 0.0,
            tokens_trained=sum(group.tokens_trained for group in groups),
            tokens_shared=sum(group.tokens_shared for group in groups),
            retokenised_tokens=sum(self.retokenised.values()),
            max_logprob_gap=max((step.max_logprob_gap for step in trained), default=0.0),
            staleness_mean=_mean([step.staleness_mean for step in steps]),
            clipped_rollouts=sum(step.clipped_rollouts for step in trained),
            switches_to_training=len(self.switches["training"]),
            switches_to_rollout=len(self.switches["rollout"]),
            mean_switch_to_training_s=_mean(self.switches["training"]),
            mean_switch_to_rollout_s=_mean(self.switches["rollout"]),
            moved_live_requests=self.moved,
            micro_steps_per_cell=[sum(step.cell == cell for step in trained) for cell in range(num_cells)],
            troubles=self.troubles,
        )


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4) if values else 0.0


def sparkline(values: Sequence[float], *, low: float = 0.0, high: float = 1.0) -> str:
    """One character a value, between `low` and `high`."""
    span = (high - low) or 1.0
    return "".join(BARS[min(7, max(0, int((value - low) / span * 8)))] for value in values)


def render_summary(summary: Summary) -> str:
    """At most 80 columns of plain text."""
    cells = " ".join(str(count) for count in summary.micro_steps_per_cell)
    lines = [
        f"run {summary.name}: {summary.ended or 'not ended in order'} after {summary.wall_s:.0f} s",
        f"  policy {summary.policy}, seed {summary.seed}, {summary.steps} steps, {summary.rollouts} rollouts",
        f"  held-out reward   {_score(summary.eval_before)} before, {_score(summary.eval_after)} after",
        f"  training reward   {_curve(summary.reward_per_step)}",
        f"  tokens            {summary.tokens_sampled} sampled ({summary.tokens_per_s:.0f}/s),"
        f" {summary.tokens_trained} trained, {summary.tokens_shared} shared",
        f"  retokenised       {summary.retokenised_tokens} tokens",
        f"  log-prob gap      {summary.max_logprob_gap:.1e} at most (engine against trainer)",
        f"  switches          {summary.switches_to_training} to training"
        f" ({summary.mean_switch_to_training_s:.2f} s), {summary.switches_to_rollout} to rollout"
        f" ({summary.mean_switch_to_rollout_s:.2f} s)",
        f"  live requests     {summary.moved_live_requests} moved between cells",
        f"  micro-steps       {cells} by cell",
        f"  harness errors    {summary.harness_errors}, dropped rollouts {summary.rollouts_dropped}",
        *(f"  {trouble}" for trouble in summary.troubles[-5:]),
    ]
    return "\n".join(_within(line) for line in lines) + "\n"


def _curve(rewards: Sequence[float]) -> str:
    """The rewards as one sparkline of at most 40 characters; a longer run shows means of equal parts."""
    if not rewards:
        return "no step trained"
    parts = np.array_split(np.asarray(rewards), min(40, len(rewards)))
    return f"{sparkline([float(part.mean()) for part in parts])} {rewards[0]:.2f} to {rewards[-1]:.2f}"


def _within(line: str) -> str:
    return line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"


def _score(value: float) -> str:
    return f"{value:.3f}" if value >= 0 else "not evaluated"
