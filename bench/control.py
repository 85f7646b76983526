"""The scheduler's decision time at 1,536 ranks, and how it grows with the rollouts in flight and the cells.

`us_per_event`: microseconds of `Scheduler.handle` by (cells, rollouts), mean over a whole step, and the slowest
single event apart from dispatches of a whole batch (`worst_ms`, `dispatch_ms`). `place_s` is the pure election
of 1,536 ranks; `bytes_per_tick` what one snapshot weighs as JSON, `largest_real_world` the most gloo processes
that this benchmark starts itself: none. Wall time of this machine, one core.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path

from gyre.config.choices import PolicyName
from gyre.config.load import load_settings
from gyre.schedule.commands import Admit, Command, Dispatch
from gyre.schedule.events import CellServing, Event, GroupReady, RolloutStarted, RolloutTerminated, Tick
from gyre.schedule.placement import place
from gyre.schedule.policy import Forecast, SchedulerSettings
from gyre.schedule.scheduler import Scheduler
from gyre.types import RankFacts

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "paper" / "2.4t-nl2repo.toml"
GROUP = 16


class Stopwatch:
    """Feeds a scheduler and keeps the seconds of each event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self.now = scheduler, 0.0
        self.seconds: list[float] = []
        self.dispatch_seconds: list[float] = []

    def feed(self, event: Event) -> list[Command]:
        """One event, a virtual second after the last."""
        self.now += 1.0
        began = time.perf_counter()
        commands = self._scheduler.handle(event, self.now)
        taken = time.perf_counter() - began
        is_batch = any(isinstance(command, Dispatch) for command in commands)
        (self.dispatch_seconds if is_batch else self.seconds).append(taken)
        return commands


def measure(num_cells: int, num_rollouts: int, policy: PolicyName) -> dict[str, float]:
    """One step in which `num_rollouts` start and end while nobody trains but who must."""
    groups = num_rollouts // GROUP
    plan = SchedulerSettings(
        num_cells=num_cells,
        cell_capacity=-(-num_rollouts // max(num_cells - 1, 1)),
        steps=2,
        groups_per_batch=groups,
        rollouts_per_group=GROUP,
        policy=policy,
        forecast=Forecast(limit_s=1e5, group_s=tuple(1000.0 + group for group in range(2 * groups))),
    )
    scheduler = Scheduler(plan)
    watch = Stopwatch(scheduler)
    admitted: list[str] = []
    for cell in range(num_cells):
        commands = watch.feed(CellServing(cell=cell, version=0))
        admitted += [command.rollout for command in commands if isinstance(command, Admit)]
    for rollout in admitted:
        watch.feed(RolloutStarted(rollout=rollout))
    for group in range(groups):
        for member in range(GROUP):
            watch.feed(RolloutTerminated(rollout=f"{group}.{member}"))
        watch.feed(GroupReady(group=group, num_micro_steps=2))
        watch.feed(Tick())
    size = len(json.dumps(asdict(scheduler.snapshot())))
    return {
        "us_per_event": round(1e6 * sum(watch.seconds) / len(watch.seconds), 2),
        "worst_ms": round(1e3 * max(watch.seconds), 3),
        "dispatch_ms": round(1e3 * max(watch.dispatch_seconds), 2),
        "bytes_per_tick": size,
    }


def main() -> dict[str, object]:
    """Growth over cells and rollouts, and the election of 1,536 ranks."""
    by_size = {
        f"{num_cells} cells, {rollouts} rollouts": measure(num_cells, rollouts, PolicyName.WATERLEVEL)
        for num_cells, rollouts in ((4, 1_000), (4, 10_000), (48, 1_000), (48, 10_000))
    }
    just_in_time = measure(48, 10_000, PolicyName.JUST_IN_TIME_HISTORY)
    settings = load_settings(CONFIG)
    facts = [
        RankFacts(
            rank=rank, local_rank=rank % 8, host=f"node{rank // 8}", device=f"cuda:{rank % 8}",
            memory_bytes=80 * 2**30, versions={"torch": "2"},
        )
        for rank in range(settings.num_ranks)
    ]  # fmt: skip
    began = time.perf_counter()
    place(facts, settings)
    top = by_size["48 cells, 10000 rollouts"]
    return {
        "us_per_event": top["us_per_event"],
        "bytes_per_tick": top["bytes_per_tick"],
        "worst_ms": top["worst_ms"],
        "largest_real_world": 0,
        "num_ranks": len(facts),
        "place_s": round(time.perf_counter() - began, 3),
        "by_size": by_size,
        "just_in_time": just_in_time,
    }
