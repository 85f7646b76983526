"""Policies on equal terms: the same cluster and workload, one scheduler, one bound.

Staleness 0 is for colocation, the published staleness of the settings for the others. The best split of an
async policy is searched over all splits. Nothing here reads a file or prints.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gyre.config.choices import PolicyName
from gyre.schedule.policy import Forecast, SchedulerSettings
from gyre.simulate.bound import lower_bound_s
from gyre.simulate.cluster import Cluster
from gyre.simulate.result import Result
from gyre.simulate.workload import Workload
from gyre.simulate.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy's run. `bound_s` is the proved lower bound at its staleness; `split` counts training cells."""

    name: str
    policy: PolicyName
    staleness: float
    split: int
    result: Result
    bound_s: float

    @property
    def to_bound(self) -> float:
        """Seconds over the lower bound's."""
        return self.result.seconds / self.bound_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all rows share."""

    plan: SchedulerSettings
    cluster: Cluster
    workload: Workload
    seed: int = 0

    def run(self, policy: PolicyName, *, staleness: float, split: int = 0) -> Result:
        """Simulate one policy."""
        plan = replace(
            self.plan, policy=policy, staleness=staleness, training_cells=split, forecast=self._forecast(policy)
        )
        return World(plan, self.cluster, self.workload, seed=self.seed).run()

    def bound_s(self, staleness: float) -> float:
        """The lower bound at a staleness."""
        return lower_bound_s(replace(self.plan, staleness=staleness), self.cluster, self.workload)

    def _forecast(self, policy: PolicyName) -> Forecast:
        limit_s = self.workload.limit_s
        if policy is PolicyName.JUST_IN_TIME_HISTORY:
            return Forecast(limit_s=limit_s, group_s=tuple(group.forecast_s for group in self.workload.groups))
        # Without history only the limit is known, and it is one of wall time: on a full cell.
        return Forecast(limit_s=limit_s * self.cluster.slowdown(self.plan.cell_capacity))


def row(setting: Setting, policy: PolicyName, *, staleness: float, bound_s: float) -> Row:
    """One policy that is no async split."""
    result = setting.run(policy, staleness=staleness)
    return Row(name=policy.value, policy=policy, staleness=staleness, split=0, result=result, bound_s=bound_s)


def splits(setting: Setting, policy: PolicyName, *, staleness: float, bound_s: float) -> list[Row]:
    """An async policy with half of the cells in training and with the best split; nothing for a single cell."""
    num_cells, half = setting.plan.num_cells, setting.plan.num_cells // 2
    runs = {split: setting.run(policy, staleness=staleness, split=split) for split in range(1, num_cells)}
    if not runs:
        return []
    best = min(runs, key=lambda split: runs[split].seconds)
    return [
        Row(
            name=f"{policy.value}, {words} split",
            policy=policy,
            staleness=staleness,
            split=split,
            result=runs[split],
            bound_s=bound_s,
        )
        for words, split in (("half", half), ("best", best))
    ]


def compare(setting: Setting, *, staleness: float, stalenesses: tuple[float, ...] = (0, 1, 2, 3)) -> Iterator[Row]:
    """Every policy at `staleness`, the elastic ones at all `stalenesses`; colocation at 0."""
    bounds = {one: setting.bound_s(one) for one in {0.0, float(staleness), *map(float, stalenesses)}}
    for policy in (PolicyName.COLOCATE, PolicyName.COLOCATE_STREAMING):
        yield row(setting, policy, staleness=0.0, bound_s=bounds[0.0])
    for policy in (PolicyName.ASYNC, PolicyName.ASYNC_STREAMING):
        yield from splits(setting, policy, staleness=staleness, bound_s=bounds[float(staleness)])
    for one in sorted({float(staleness), *map(float, stalenesses)}):
        for policy in (PolicyName.WATERLEVEL, PolicyName.JUST_IN_TIME, PolicyName.JUST_IN_TIME_HISTORY):
            yield row(setting, policy, staleness=one, bound_s=bounds[one])
