"""Whole runs of gyre.py under torchrun with real engines, replicas, harness and sandboxes: how they end and go on.

The runs share one tiny size: two cells, two groups of two rollouts a step, learning rate 0 where runs are compared.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre.config.load import load_settings
from gyre.program.replay import replay
from gyre.schedule.policy import SchedulerSettings
from gyre.store import records
from gyre.store.store import EVENTS, TOKENS, read_records
from gyre.store.summary import summarize
from gyre.tasks.shell import write_split
from tests.fakes.launcher import Launched

START_S = 240.0
"""An engine starts in 12 s on a quiet machine; several at once on a loaded one need far longer."""

SMALL = {
    "placement.num_cells": 2,
    "run.steps": 2,
    "run.seed": 3,
    "trainer.learning_rate": 0,
    "schedule.groups_per_batch": 2,
    "schedule.rollouts_per_group": 4,
    "schedule.cell_capacity": 6,
    "tasks.eval_rollouts": 0,
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's tasks, written anew."""
    folder = tmp_path_factory.mktemp("tasks")
    write_split(folder, num_train=24, num_held_out=4, seed=0)
    return folder


@pytest.fixture
def start(tmp_path: Path, tasks: Path) -> Iterator[object]:
    """Starts runs and cleans up after them."""
    started: list[Launched] = []

    def begin(name: str, *, resume: bool = False, **settings: object) -> Launched:
        chosen = {"tasks.train": tasks / "train", "tasks.held_out": tasks / "held_out", **SMALL}
        chosen |= {key.replace("__", "."): value for key, value in settings.items()}
        run = Launched(tmp_path, name, ranks=int(chosen["placement.num_cells"]), settings=chosen, resume=resume)
        started.append(run)
        return run

    yield begin
    for run in started:
        run.close()


def tokens_of(folder: Path) -> dict[tuple[str, int], bytes]:
    """(rollout, turn) -> what was sampled; a later life of a rollout replaces an earlier one."""
    turns = [record for record in read_records(folder / TOKENS) if isinstance(record, records.TurnDone)]
    return {(turn.rollout, turn.turn): turn.output_tokens for turn in turns}


def rewards_of(folder: Path) -> dict[str, float]:
    """Reward of every rollout."""
    scored = [record for record in read_records(folder / EVENTS) if isinstance(record, records.RolloutScored)]
    return {record.rollout: record.reward for record in scored}


@pytest.mark.timeout(900)
def test_interrupted_run_ends_in_15_s_and_resumes_to_the_same_tokens(start: object, tmp_path: Path) -> None:
    """Learning rate 0: the whole run is a function of the seed, with or without an interruption."""
    whole = start("whole")
    assert whole.await_end(deadline_s=START_S + 120) == 0, whole.output
    whole.await_nothing_left(deadline_s=15)
    summary = summarize(whole.folder)
    assert (summary.ended, summary.steps, summary.retokenised_tokens, summary.harness_errors) == ("finished", 2, 0, 0)
    settings = load_settings(whole.folder / "config.toml")
    replay(whole.folder, SchedulerSettings.of(settings, is_held=True))

    cut = start("cut", run__steps=4)
    cut.await_output("step 1 trained", deadline_s=START_S + 60)
    began = time.monotonic()
    cut.interrupt()
    cut.await_end(deadline_s=15)
    cut.await_nothing_left(deadline_s=15 - (time.monotonic() - began))
    assert "SIGINT" in summarize(cut.folder).ended

    refused = start("cut", run__steps=2)
    assert refused.await_end(deadline_s=60) != 0
    assert "--resume" in refused.output and "steps trained" in refused.output

    resumed = start("cut", resume=True, run__steps=2)
    assert resumed.await_end(deadline_s=START_S + 120) == 0, resumed.output
    summary = summarize(cut.folder)
    assert summary.ended == "finished" and summary.steps == 2
    wanted = tokens_of(whole.folder)
    found = tokens_of(cut.folder)
    assert {key: found.get(key) for key in wanted} == wanted
    assert {key: rewards_of(cut.folder).get(key) for key in rewards_of(whole.folder)} == rewards_of(whole.folder)
    resumed.await_nothing_left(deadline_s=15)


@pytest.mark.timeout(600)
def test_killed_rank_ends_the_run_in_15_s_and_is_named(start: object) -> None:
    run = start("killed", run__steps=50)
    run.await_output("step 1 trained", deadline_s=START_S + 60)
    victim = run.rank_pid(1)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    assert run.await_end(deadline_s=15) != 0
    run.await_nothing_left(deadline_s=max(0.5, 15 - (time.monotonic() - began)))
    assert f"rank 1 (cell 1, host {os.uname().nodename}, pid {victim}) died" in run.output
    assert "rank 1" in summarize(run.folder).ended


@pytest.mark.timeout(120)
def test_bad_setting_is_told_once_with_exit_code_2_before_anything_starts(start: object) -> None:
    run = start("bad", trainer__learning_rat=1)
    assert run.await_end(deadline_s=60) != 0
    assert run.output.count("gyre: configuration:") == 1
    assert "learning_rate" in run.output and "exitcode  : 2" in run.output
    assert not run.folder.exists()
