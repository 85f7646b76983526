"""Records of a small run as the front would write them, for tests of the store and the summary."""

import msgspec
import numpy as np

from gyre.store import records


def began(*, resumed_version: int = 0, num_cells: int = 2) -> records.RunBegan:
    return records.RunBegan(
        name="toy", seed=3, policy="waterlevel", steps=2, num_cells=num_cells, started_at=0.0,
        resumed_version=resumed_version, config_sha256="", groups_per_batch=1,
    )  # fmt: skip


def turn(rollout: str, number: int, *, node: int | None = None, tokens: int = 4) -> records.TurnDone:
    ids = np.arange(tokens, dtype="<i4")
    return records.TurnDone(
        rollout=rollout, turn=number, call=f"{rollout}-{number}", parent_node=None,
        node=2 * number + 1 if node is None else node, context_tokens=ids.tobytes(), output_tokens=ids.tobytes(),
        logprobs=np.zeros(tokens, "<f4").tobytes(), spans=[(0, tokens, 0)], finish="stop", cached_tokens=0,
        retokenised=0, moved=0, seconds=0.5,
    )  # fmt: skip


def step(number: int, *, reward: float, time: float) -> list[records.Record]:
    """Everything about one step of one group and one micro-step for each of two cells."""
    micro_steps = [
        records.MicroStepTrained(
            step=number, index=cell, cell=cell, seconds=0.1, num_targets=4, loss=0.0, max_logprob_gap=1e-6 * (cell + 1),
            mean_logprob_gap=1e-7, clipped_rollouts=cell, entropy=1.0,
        )
        for cell in range(2)
    ]  # fmt: skip
    return [
        records.GroupReady(
            group=number, advantages={f"{number}.0": 1.0}, num_micro_steps=2, tokens_trained=8, tokens_shared=3
        ),
        *micro_steps,
        records.StepTrained(
            step=number, version=number + 1, reward_mean=reward, grad_norm=1.0, num_rollouts=2, seconds=0.2,
            checkpoint=f"step-{number + 1:06d}", clipped=1, staleness_mean=0.5, time=time,
        ),
    ]  # fmt: skip


def whole_run() -> list[records.Record]:
    """Two cells, two steps, one switch each way, one moved request; ended in order after 20 s."""
    rollouts = ["0.0", "0.1", "1.0", "1.1"]
    changes = [
        records.RolloutChanged(
            rollout=rollout, state=state, task="t", purpose="train", group=int(rollout[0]), time=1.0, detail=""
        )
        for rollout in rollouts
        for state in ("dispatched", "running", "ended", "scored")
    ]
    scores = [records.RolloutScored(rollout=one, reward=0.5, checks={"a": 0.5}, error="", tries=1) for one in rollouts]
    return [
        began(),
        records.Evaluated(name="before", rewards=[0.0, 0.4], mean=0.2),
        *changes,
        *scores,
        *(turn(rollout, number) for number in range(3) for rollout in rollouts),
        *step(0, reward=0.25, time=8.0),
        records.Switched(cell=1, to="training", seconds=1.0, step=0),
        records.Switched(cell=1, to="rollout", seconds=3.0, step=0),
        records.LiveRequestMoved(rollout="1.0", call="c", source=1, destination=0, tokens_kept=7),
        *step(1, reward=0.75, time=16.0),
        records.Evaluated(name="after", rewards=[0.5, 1.0], mean=0.75),
        records.RunEnded(reason="finished", wall_s=20.0),
    ]


def story() -> list[records.Record]:
    """Two cells, one step, with the scheduler's journal and times: two rollouts, one moved, two calls at once."""

    def event(now: float, kind: str, **values: object) -> records.Record:
        return records.ScheduleEvent(now=now, kind=kind, values=values)

    def command(now: float, kind: str, **values: object) -> records.Record:
        return records.ScheduleCommand(now=now, kind=kind, values=values)

    def change(rollout: str, state: str, time: float) -> records.Record:
        return records.RolloutChanged(
            rollout=rollout, state=state, task="sum", purpose="train", group=0, time=time, detail=""
        )

    def call(rollout: str, number: int, *, begin: float, end: float, waited_s: float = 0.0) -> records.Record:
        return msgspec.structs.replace(
            turn(rollout, number), time=end, seconds=end - begin, waited_s=waited_s, moved=int(waited_s > 0)
        )

    trained = step(0, reward=0.5, time=16.0)
    return [
        began(),
        *(event(5.0 + cell, "CellServing", cell=cell, version=0) for cell in range(2)),
        *(change(rollout, "dispatched", 6.0) for rollout in ("0.0", "0.1")),
        command(6.0, "Dispatch", group=0),
        *(change(rollout, "running", 7.0) for rollout in ("0.0", "0.1")),
        call("0.0", 0, begin=7.5, end=9.0),
        call("0.1", 0, begin=8.0, end=10.0, waited_s=0.5),
        call("0.1", 1, begin=9.0, end=11.0),
        records.LiveRequestMoved(rollout="0.1", call="c", source=1, destination=0, tokens_kept=7, time=8.5),
        change("0.0", "ended", 11.0),
        event(11.0, "RolloutTerminated", rollout="0.0"),
        command(11.0, "Drain", cell=0),
        event(11.5, "CellDrained", cell=0),
        command(11.5, "JoinStep", cell=0, step=0, version=0),
        event(12.0, "CellReleased", cell=0),
        event(12.5, "CellJoined", cell=0, step=0),
        records.Switched(cell=0, to="training", seconds=1.5, step=0, time=12.5),
        change("0.1", "ended", 12.6),
        event(12.6, "RolloutTerminated", rollout="0.1"),
        *(records.RolloutScored(rollout=one, reward=0.5, checks={}, error="", tries=1) for one in ("0.0", "0.1")),
        *(change(rollout, "scored", 13.0) for rollout in ("0.0", "0.1")),
        msgspec.structs.replace(trained[1], time=14.0),
        command(15.0, "CloseStep", step=0, members=1),
        trained[-1],
        event(16.0, "StepPublished", step=0, version=1),
        command(16.0, "ReturnToRollout", cell=0, version=1),
        command(16.0, "LoadWeights", cell=1, version=1),
        event(17.0, "CellServing", cell=0, version=1),
        event(17.0, "CellServing", cell=1, version=1),
        records.Trouble(level="warning", text="<b>something</b> odd", time=17.5),
        records.RunEnded(reason="finished", wall_s=18.0),
    ]
