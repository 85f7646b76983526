"""What the simulated cluster costs: decoding speed by load, switches, pulls, moves, failures. Numbers only.

A rollout alternates decoding and tools. Alone on a cell, `tool_share` of its time is tools. With b rollouts
decoding at once each is slowed by 1 + (b - 1) / half_speed_rollouts: a decode step reads the weights once and
each rollout's KV besides. Times are seconds; a rollout's work is its seconds alone on a cell.
"""

import math
from dataclasses import dataclass

from gyre.config.schema import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The model of the cells; the meanings are those of the [simulate] section."""

    tool_share: float
    half_speed_rollouts: float
    optimizer_s: float
    switch_to_training_s: float
    switch_to_rollout_s: float
    pull_s: float
    move_s: float
    grading_s: float
    share_imbalance: float = 0.0
    cell_loss_hours: float = 0.0
    restart_s: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> "Cluster":
        """The cluster that the settings assume."""
        one = settings.simulate
        return cls(
            tool_share=one.tool_share,
            half_speed_rollouts=one.half_speed_rollouts,
            optimizer_s=one.optimizer_s,
            switch_to_training_s=one.switch_to_training_s,
            switch_to_rollout_s=one.switch_to_rollout_s,
            pull_s=one.pull_s,
            move_s=one.move_s if one.kv_migration else one.recompute_s,
            grading_s=one.grading_s,
            share_imbalance=one.share_imbalance,
            cell_loss_hours=one.cell_loss_hours,
            restart_s=one.restart_s,
        )

    def slowdown(self, load: int) -> float:
        """Seconds that a second of lone work takes with `load` >= 1 rollouts on the cell.

        With x the decoding seconds a second of work costs, x / (tools + x) of the rollouts decode at once:
        x = d (1 + (load x / (tools + x) - 1) / h), d = 1 - tools; its positive root, or d while fewer than one decode.
        """
        tools, half = self.tool_share, self.half_speed_rollouts
        decode = 1.0 - tools
        if load * decode <= 1.0:
            return 1.0
        # x^2 + x (tools - c - d load / h) - c tools = 0, with c = d (1 - 1 / h)
        c = decode * (1.0 - 1.0 / half)
        b = tools - c - decode * load / half
        return tools + (-b + math.sqrt(b * b + 4.0 * c * tools)) / 2.0 if c * tools or b < 0 else 1.0
