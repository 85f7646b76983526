"""Runs of the quickstart from outside, as a user starts it, and what a good one's summary must say.

`python -m tests.quickstart.runs FOLDER` prints a table of the runs in FOLDER.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUN_DEADLINE_S = 1500.0
STOP_DEADLINE_S = 20.0

COLUMNS = (
    "seed",
    "steps",
    "eval_before",
    "eval_after",
    "switches_to_training",
    "switches_to_rollout",
    "moved_live_requests",
    "max_logprob_gap",
    "wall_s",
)

Summary = Mapping[str, Any]


def run_quickstart(folder: Path, name: str, overrides: Mapping[str, str]) -> Summary:
    """Run it as FOLDER/NAME unless a finished run lies there; returns its summary. An unfinished one starts over.

    Raises AssertionError with the end of the output if the run fails or exceeds its deadline.
    """
    summary = folder / name / "summary.json"
    if not summary.exists():
        shutil.rmtree(folder / name, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = {"run.folder": str(folder), "run.name": name, "watch.dashboard": "lines", **overrides}
        words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        _call(["bash", str(ROOT / "launch" / "quickstart.sh"), *words], folder / f"{name}.log")
    assert summary.exists(), f"the run ended well but wrote no {summary}"
    return json.loads(summary.read_text())


def _call(argv: list[str], log_path: Path) -> None:
    with log_path.open("wb") as output:
        process = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(RUN_DEADLINE_S)
        except BaseException as error:
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = f"nothing after {RUN_DEADLINE_S:.0f} s"
    assert code == 0, f"{' '.join(argv)}\nended with {code}:\n{_tail(log_path)}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop it as a user would; by force if that does not help."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_DEADLINE_S)


def _tail(path: Path, lines: int = 40) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def faults_of(summary: Summary) -> list[str]:
    """What a summary says that no quickstart may say, whatever its seed and learning rate."""
    rules = {
        "retokenised_tokens == 0": summary["retokenised_tokens"] == 0,
        "harness_errors == 0": summary["harness_errors"] == 0,
        "switches_to_training >= 4": summary["switches_to_training"] >= 4,
        "switches_to_rollout >= 4": summary["switches_to_rollout"] >= 4,
        "moved_live_requests >= 2": summary["moved_live_requests"] >= 2,
        "min(micro_steps_per_cell) > 0": min(summary["micro_steps_per_cell"]) > 0,
        "max_logprob_gap < 1e-4": summary["max_logprob_gap"] < 1e-4,
        "eval_before >= 0": summary["eval_before"] >= 0.0,
        "eval_after >= 0": summary["eval_after"] >= 0.0,
        "len(reward_per_step) == steps": len(summary["reward_per_step"]) == summary["steps"],
    }
    return _broken(rules, summary)


def learning_faults_of(summary: Summary) -> list[str]:
    """What a summary says that a run which learns may not say."""
    rules = {"eval_before <= 0.3": summary["eval_before"] <= 0.3, "eval_after >= 0.6": summary["eval_after"] >= 0.6}
    return _broken(rules, summary)


def _broken(rules: Mapping[str, bool], summary: Summary) -> list[str]:
    broken = [rule for rule, holds in rules.items() if not holds]
    return [f"not {rule}, but {[summary[key] for key in summary if key in rule]}" for rule in broken]


def table_of(folder: Path) -> str:
    """The finished runs in a folder, one a row."""
    rows = [("run", *COLUMNS)]
    for path in sorted(folder.glob("*/summary.json")):
        summary = json.loads(path.read_text())
        rows.append((path.parent.name, *(_cell(summary.get(column)) for column in COLUMNS)))
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.stdout.write(table_of(Path(sys.argv[1])) + "\n")
