"""The quickstart learns, switches and leaves no fault: one seed always, three and a control in the long tier.

The long tier keeps its runs under runs/long and does not repeat one that finished.
"""

from pathlib import Path

import pytest

from tests.quickstart.runs import ROOT, RUN_DEADLINE_S, faults_of, learning_faults_of, run_quickstart

LONG_RUNS = ROOT / "runs" / "long"

pytestmark = pytest.mark.timeout(RUN_DEADLINE_S + 60)


def test_one_seed_learns(tmp_path: Path) -> None:
    summary = run_quickstart(tmp_path, "seed-0", {"run.seed": "0"})
    assert faults_of(summary) + learning_faults_of(summary) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_seed_learns(seed: int) -> None:
    summary = run_quickstart(LONG_RUNS, f"seed-{seed}", {"run.seed": str(seed)})
    assert faults_of(summary) + learning_faults_of(summary) == []


@pytest.mark.long
def test_a_learning_rate_of_zero_gains_nothing() -> None:
    summary = run_quickstart(LONG_RUNS, "control", {"run.seed": "0", "trainer.learning_rate": "0.0"})
    assert faults_of(summary) == []
    assert summary["eval_after"] - summary["eval_before"] < 0.1
