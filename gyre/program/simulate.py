"""`gyre.py simulate CONFIG`: the configured run under a virtual clock, beside the other policies.

The first row marked `*` is what CONFIG names. `--replay RUN` simulates what a run folder recorded and says how
far the predicted step time is from the measured one. Nothing heavy is imported; nothing is written but the
picture that was asked for.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from gyre.config.schema import Settings
from gyre.errors import ConfigError
from gyre.program.recorded import Recorded, read_recorded
from gyre.schedule.policy import SchedulerSettings
from gyre.simulate.cluster import Cluster
from gyre.simulate.compare import Row, Setting, compare, row
from gyre.simulate.picture import draw
from gyre.simulate.workload import parametric
from gyre.simulate.world import World


def setting_of(settings: Settings) -> Setting:
    """What the configuration asks to simulate."""
    if settings.run.steps == 0:
        raise ConfigError("run.steps", wanted="1 or more to simulate", given=0)
    seed = settings.run.seed
    workload = parametric(settings, seed=seed)
    return Setting(plan=SchedulerSettings.of(settings), cluster=Cluster.of(settings), workload=workload, seed=seed)


def simulate(settings: Settings, *, is_json: bool, picture: Path | None, picture_hours: float | None) -> int:
    """Print the table or its JSON; draw the configured policy."""
    setting = setting_of(settings)
    plan = setting.plan
    rows = list(compare(setting, staleness=plan.staleness))
    chosen = _chosen(setting, rows)
    if chosen not in rows:
        rows.insert(0, chosen)
    if picture is not None:
        title = f"{settings.run.name}: {chosen.name}, staleness {chosen.staleness:g}"
        text = draw(
            chosen.result, title=title, capacity=plan.cell_capacity, num_cells=plan.num_cells, hours=picture_hours
        )
        picture.write_text(text, encoding="utf-8")
    if is_json:
        sys.stdout.write(json.dumps([_fields(one, rows) for one in rows]) + "\n")
    else:
        sys.stdout.write(table(settings, rows, chosen))
    return 0


def simulate_replay(folder: Path, *, is_json: bool) -> int:
    """Simulate a recorded run's workload; print measured and predicted step times."""
    recorded = read_recorded(folder)
    report = predict(recorded)
    if is_json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write(
            f"{folder}: {recorded.plan.steps} steps on {recorded.plan.num_cells} cells\n"
            f"  measured  {report['measured_step_s']:.2f} s a step\n"
            f"  predicted {report['predicted_step_s']:.2f} s a step ({100 * report['error']:+.1f} %)\n"
        )
    return 0


def predict(recorded: Recorded) -> dict[str, float]:
    """Mean step seconds, measured and simulated, and the relative error."""
    result = World(recorded.plan, recorded.cluster, recorded.workload).run()
    measured, predicted = recorded.seconds / recorded.plan.steps, result.seconds / recorded.plan.steps
    return {
        "measured_step_s": measured,
        "predicted_step_s": predicted,
        "error": predicted / measured - 1.0,
        "measured_switches": float(recorded.switches),
        "predicted_switches": float(result.switches),
    }


def _chosen(setting: Setting, rows: list[Row]) -> Row:
    plan = setting.plan
    if plan.policy.is_async and plan.training_cells:
        split = plan.training_cells
        result = setting.run(plan.policy, staleness=plan.staleness, split=split)
        return Row(
            name=f"{plan.policy.value}, {split} train",
            policy=plan.policy,
            staleness=plan.staleness,
            split=split,
            result=result,
            bound_s=setting.bound_s(plan.staleness),
        )
    for one in rows:
        if one.policy is plan.policy and one.staleness == plan.staleness:
            return one
    return row(setting, plan.policy, staleness=plan.staleness, bound_s=setting.bound_s(plan.staleness))


def _baselines(rows: list[Row]) -> dict[str, Row]:
    names = {
        "vs_colocate": "colocate",
        "vs_async_half": "async, half split",
        "vs_async_best": "async, best split",
    }
    return {key: one for key, name in names.items() for one in rows if one.name == name}


def _fields(one: Row, rows: list[Row]) -> dict[str, object]:
    result = {
        key: value for key, value in asdict(one.result).items() if key not in ("segments", "levels", "step_ends_s")
    }
    ratios = {key: base.result.seconds / one.result.seconds for key, base in _baselines(rows).items()}
    head = {"policy": one.name, "staleness": one.staleness, "training_cells": one.split, "hours": one.result.hours}
    return head | ratios | {"vs_lower_bound": one.to_bound, "lower_bound_s": one.bound_s} | result


def table(settings: Settings, rows: list[Row], chosen: Row) -> str:
    """The comparison as text."""
    where = settings.placement
    bases = _baselines(rows)
    lines = [
        f"{settings.run.name}: {settings.run.steps} steps on {where.num_cells} cells of {settings.ranks_per_cell} "
        f"ranks, {settings.schedule.groups_per_batch} x {settings.schedule.rollouts_per_group} rollouts a step",
        f"{'policy':<33}{'stale':>6}{'hours':>9}{'/coloc':>8}{'/half':>7}{'/best':>7}{'/bound':>8}"
        f"{'idle r':>8}{'slack r':>8}{'idle t':>8}{'switches':>10}{'moves':>8}{'bias':>8}",
    ]
    for one in rows:
        result = one.result
        ratios = [
            f"{bases[key].result.seconds / result.seconds:.2f}" if key in bases else "-"
            for key in ("vs_colocate", "vs_async_half", "vs_async_best")
        ]
        mark = "*" if one is chosen else " "
        name = f"{mark}{one.name}" + (f" ({one.split})" if one.split else "")
        lines.append(
            f"{name:<33}{one.staleness:>6g}{result.hours:>9.2f}{ratios[0]:>8}{ratios[1]:>7}{ratios[2]:>7}"
            f"{one.to_bound:>8.3f}{100 * result.idle_rollout:>7.1f}%{100 * result.slack_rollout:>7.1f}%"
            f"{100 * result.idle_training:>7.1f}%{result.switches:>10}{result.moves:>8}{100 * result.bias:>7.2f}%"
        )
    lines.append(
        "* as configured. /coloc, /half, /best: how often faster than colocate, async half and async best; "
        "/bound: hours over the proved lower bound\n"
        "idle r: cells in rollout without a rollout; slack r: their free places; idle t: members without work"
    )
    return "\n".join(lines) + "\n"
