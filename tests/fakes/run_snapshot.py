"""A snapshot of a run in full swing, for tests of what is shown."""

from dataclasses import replace
from typing import Any

from gyre.schedule.cells import CellState
from gyre.schedule.snapshot import BatchSnapshot, CellSnapshot, ScheduleSnapshot
from gyre.types import Role
from gyre.watch.snapshot import CellPicture, RunSnapshot, SwitchPicture

STATES = (CellState.TRAINING, CellState.SERVING, CellState.SERVING, CellState.DRAINING)


def make_schedule(states: tuple[CellState, ...] = STATES) -> ScheduleSnapshot:
    cells = tuple(
        CellSnapshot(
            index=index, role=Role.SATELLITE if index else Role.CORE, state=state, since=190.0 + index,
            routed=5 if state is CellState.SERVING else 0, capacity=8,
        )
        for index, state in enumerate(states)
    )  # fmt: skip
    return ScheduleSnapshot(
        cells=cells, version=12, steps=40, capacity=16, waterlevel=10, dispatched=112, started=112, terminated=102,
        waiting=0, groups_dispatched=14, is_held=False, is_finished=False, is_aborted=False,
        batch=BatchSnapshot(
            step=12, num_groups=4, groups_ready=2, micro_steps_ready=4, micro_steps_claimed=3, micro_steps_done=2,
            is_closed=False,
        ),
    )  # fmt: skip


def make_snapshot(states: tuple[CellState, ...] = STATES, **changes: Any) -> RunSnapshot:
    snapshot = RunSnapshot(
        name="quickstart",
        policy="waterlevel",
        seed=0,
        phase="training",
        elapsed_s=204.3,
        eta_s=430.0,
        schedule=make_schedule(states),
        cells=tuple(CellPicture(version=12, requests=3, doing="serving", doing_s=4.0) for _ in states),
        rollout_states={"running": 10, "ended": 1, "scored": 101},
        longest_running_s=14.0,
        tokens_sampled=123456,
        tokens_per_s=812.4,
        rewards=tuple(0.25 + 0.04 * index for index in range(12)),
        eval_before=0.21,
        max_logprob_gap=3.2e-6,
        clip_share=0.12,
        staleness_mean=0.4,
        moved_live_requests=6,
        switches=(SwitchPicture(cell=0, duty="training", seconds=0.9, at_s=198.0),),
        messages=("warning: rollout 3.1 could not be graded",),
    )
    return replace(snapshot, **changes)
