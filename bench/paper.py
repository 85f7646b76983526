"""The published comparisons in simulation: ratios over colocate, async and the lower bound for four workloads.

`python -m bench paper [SEEDS]` simulates 48 steps of each reference workload (configs/paper), one seed by default,
and prints them beside the published ratios; more seeds are averaged. `vs_*` are of one policy on every workload,
just-in-time-history: how many times faster it is at staleness 1, and its hours over the proved bound at 1 and 2.
`waterlevel_*` are the same of the published rule, `just_in_time_*` of the rule without history, `*_error_1` with a
history that errs by sigma 1. All are ratios of hours; `bias` is trained against dispatched mean work, the largest.
"""

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from gyre.config.choices import PolicyName
from gyre.config.load import load_settings
from gyre.program.simulate import setting_of
from gyre.simulate.compare import Setting, splits

FOLDER = Path(__file__).resolve().parents[1] / "configs" / "paper"
NAMES = {
    "2.4T-nl2repo": "2.4t-nl2repo",
    "122B-nl2repo": "122b-nl2repo",
    "122B-terminal": "122b-terminal",
    "122B-deepswe": "122b-deepswe",
}
ELASTIC = (PolicyName.WATERLEVEL, PolicyName.JUST_IN_TIME, PolicyName.JUST_IN_TIME_HISTORY)
PUBLISHED = {
    "2.4T-nl2repo": "published: 1.21 over colocate, 1.78 over async",
    "122B-nl2repo": "published range of the three at 122B: 1.36-1.85 over colocate, 1.38-1.57 over async",
    "122B-terminal": "published range as above",
    "122B-deepswe": "published range as above",
}


def main() -> dict[str, dict[str, float | str]]:
    """All four workloads."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    found = {}
    for name, stem in NAMES.items():
        runs = [_one(stem, seed) for seed in range(seeds)]
        found[name] = {key: round(fmean(run[key] for run in runs), 4) for key in runs[0]}
        _tell(name, found[name])
    found["122B-nl2repo"]["wide_cells_cost"] = round(_wide_cells_cost(), 4)
    print(
        "122B on NL2Repo with 4 cells of 8 nodes instead of 8 of 4: "
        f"{100 * found['122B-nl2repo']['wide_cells_cost']:+.1f} % (published +2.2 %)\n"
        "Where we differ and why: the split of the published async is not known. At 2.4T a half split is nearest\n"
        "to it and a searched one is about as fast as colocate, so most of 1.78 may be an untuned split.\n"
        "Streaming saves little on a half split with more training cells than work. At 122B hours and lengths are not\n"
        "published: the shapes are assumed, and elasticity over colocate with streaming comes out far larger\n"
        "there than 1.19; of which workload that figure is, we do not know."
    )
    return found


def _setting(stem: str, *overrides: str) -> Setting:
    return setting_of(load_settings(FOLDER / f"{stem}.toml", overrides))


def _one(stem: str, seed: int) -> dict[str, float]:
    setting = _setting(stem, f"run.seed={seed}")
    bound = {eta: setting.bound_s(eta) for eta in (1.0, 2.0)}
    colocate = setting.run(PolicyName.COLOCATE, staleness=0.0)
    streaming = setting.run(PolicyName.COLOCATE_STREAMING, staleness=0.0)
    half, best = splits(setting, PolicyName.ASYNC, staleness=1.0, bound_s=bound[1.0])
    half_streaming, best_streaming = splits(setting, PolicyName.ASYNC_STREAMING, staleness=1.0, bound_s=bound[1.0])
    runs = {eta: {one: setting.run(one, staleness=eta) for one in ELASTIC} for eta in bound}
    first, second = ({one: run.seconds for one, run in runs[eta].items()} for eta in bound)
    published, ours = first[PolicyName.WATERLEVEL], first[PolicyName.JUST_IN_TIME_HISTORY]
    rough = replace(_setting(stem, f"run.seed={seed}", "simulate.history_error=1.0"), plan=setting.plan).run(
        PolicyName.JUST_IN_TIME_HISTORY, staleness=1.0
    )
    everything = [colocate, streaming, half.result, best.result, *runs[1.0].values(), *runs[2.0].values()]
    return {
        "vs_colocate": colocate.seconds / ours,
        "vs_async_half": half.result.seconds / ours,
        "vs_async_best": best.result.seconds / ours,
        "vs_lower_bound_eta1": ours / bound[1.0],
        "vs_lower_bound_eta2": second[PolicyName.JUST_IN_TIME_HISTORY] / bound[2.0],
        "bias": max(abs(run.bias) for run in everything),
        "waterlevel_vs_colocate": colocate.seconds / published,
        "waterlevel_vs_async_half": half.result.seconds / published,
        "waterlevel_vs_async_best": best.result.seconds / published,
        "waterlevel_vs_lower_bound_eta1": published / bound[1.0],
        "waterlevel_vs_lower_bound_eta2": second[PolicyName.WATERLEVEL] / bound[2.0],
        "waterlevel_vs_colocate_streaming": streaming.seconds / published,
        "streaming_saves_async_half": 1.0 - half_streaming.result.seconds / half.result.seconds,
        "streaming_saves_async_best": 1.0 - best_streaming.result.seconds / best.result.seconds,
        "just_in_time_vs_lower_bound_eta1": first[PolicyName.JUST_IN_TIME] / bound[1.0],
        "just_in_time_vs_lower_bound_eta2": second[PolicyName.JUST_IN_TIME] / bound[2.0],
        "vs_lower_bound_eta1_error_1": rough.seconds / bound[1.0],
        "colocate_hours": colocate.hours,
        "waterlevel_hours": published / 3600.0,
    }


def _wide_cells_cost() -> float:
    """Extra time of 4 cells of 8 nodes against 8 of 4: twice the places and the bandwidth, half the training time."""
    narrow = _setting("122b-nl2repo")
    one = narrow.plan
    wide = _setting("122b-nl2repo", "simulate.half_speed_rollouts=14", "simulate.train_ratio=0.00725")
    wide = replace(wide, plan=replace(one, num_cells=one.num_cells // 2, cell_capacity=one.cell_capacity * 2))
    waterlevel = PolicyName.WATERLEVEL
    return wide.run(waterlevel, staleness=1.0).seconds / narrow.run(waterlevel, staleness=1.0).seconds - 1.0


def _tell(name: str, one: dict[str, float]) -> None:
    print(
        f"{name}: just-in-time with history {one['vs_colocate']:.2f} over colocate, "
        f"{one['vs_async_half']:.2f} over async half, "
        f"{one['vs_async_best']:.2f} over async best; the published rule {one['waterlevel_vs_colocate']:.2f}, "
        f"{one['waterlevel_vs_async_half']:.2f}, {one['waterlevel_vs_async_best']:.2f}\n"
        f"    {PUBLISHED[name]}\n"
        f"    over the bound at staleness 1: {one['vs_lower_bound_eta1']:.3f} (goal 1.16), the published rule "
        f"{one['waterlevel_vs_lower_bound_eta1']:.3f}; at 2: {one['vs_lower_bound_eta2']:.3f} (goal 1.03)\n"
        f"    streaming saves async {100 * one['streaming_saves_async_half']:.1f} % (half), "
        f"{100 * one['streaming_saves_async_best']:.1f} % (best; published 11.6 %); elasticity over colocate with "
        f"streaming {one['waterlevel_vs_colocate_streaming']:.2f} (published 1.19)",
        flush=True,
    )
