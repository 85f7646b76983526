"""Every figure of a summary comes from the logs alone."""

import json
from pathlib import Path

import pytest

from gyre.errors import StoreError
from gyre.store import records
from gyre.store.store import RunStore
from gyre.store.summary import render_summary, summarize, write_summary
from tests.fakes.run_records import began, step, turn, whole_run


def fill(folder: Path, written: list[records.Record]) -> Path:
    store = RunStore.open(folder, config_text="", lock_wait_s=0.0)
    for record in written:
        store.record(record)
    store.close()
    return folder


def test_the_figures_are_those_of_the_records(tmp_path: Path) -> None:
    summary = summarize(fill(tmp_path, whole_run()))
    assert (summary.steps, summary.reward_per_step) == (2, [0.25, 0.75])
    assert (summary.switches_to_training, summary.mean_switch_to_training_s) == (1, 1.0)
    assert (summary.switches_to_rollout, summary.mean_switch_to_rollout_s) == (1, 3.0)
    assert (summary.tokens_sampled, summary.tokens_trained, summary.tokens_shared) == (48, 16, 6)
    assert (summary.retokenised_tokens, summary.harness_errors, summary.moved_live_requests) == (0, 0, 1)
    assert summary.max_logprob_gap == 2e-6
    assert summary.micro_steps_per_cell == [2, 2]
    assert (summary.eval_before, summary.eval_after) == (0.2, 0.75)
    assert (summary.wall_s, summary.seed, summary.policy, summary.ended) == (20.0, 3, "waterlevel", "finished")
    assert (summary.rollouts, summary.turns, summary.mean_turns, summary.tokens_per_s) == (4, 12, 3.0, 2.4)


def test_it_is_recomputed_from_the_logs_alone(tmp_path: Path) -> None:
    first = write_summary(fill(tmp_path, whole_run()))
    text = (tmp_path / "summary.json").read_text()
    (tmp_path / "summary.json").unlink()
    (tmp_path / "index.sqlite").unlink()
    assert write_summary(tmp_path) == first
    assert (tmp_path / "summary.json").read_text() == text
    assert json.loads(text)["reward_per_step"] == [0.25, 0.75]


def test_a_resumed_run_counts_only_the_lineage_that_survives(tmp_path: Path) -> None:
    first = [began(), *step(0, reward=0.1, time=5.0), *step(1, reward=0.2, time=9.0), *step(2, reward=0.9, time=12.0)]
    killed = [*first, records.ScheduleEvent(now=13.0, kind="Tick", values={})]
    second = [began(resumed_version=1), *step(1, reward=0.3, time=4.0), records.RunEnded(reason="finished", wall_s=6.0)]
    summary = summarize(fill(tmp_path, [*killed, turn("2.0", 0), *second]))
    assert summary.reward_per_step == [0.1, 0.3]
    assert summary.micro_steps_per_cell == [2, 2]
    assert summary.tokens_trained == 16
    assert summary.wall_s == 19.0
    assert summary.tokens_sampled == 4


def test_the_text_fits_80_columns_however_long_the_run(tmp_path: Path) -> None:
    steps = [record for number in range(200) for record in step(number, reward=number / 200, time=float(number))]
    trouble = records.Trouble(level="error", text="the run ends: " + "rank 1 died " * 20)
    text = render_summary(summarize(fill(tmp_path, [began(num_cells=40), *steps, trouble])))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "not ended in order after 199 s" in text
    assert "0.00 to 0.99" in text


def test_a_run_without_a_step_has_a_summary_and_an_empty_folder_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read"):
        summarize(tmp_path / "nothing")
    summary = summarize(fill(tmp_path, [began(), records.RunEnded(reason="rank 2 died", wall_s=1.5)]))
    assert (summary.steps, summary.eval_after, summary.micro_steps_per_cell) == (0, -1.0, [0, 0])
    assert "no step trained" in render_summary(summary)
