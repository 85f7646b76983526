"""A proved lower bound of a run's seconds under strict batches, whatever the policy.

Let T_v be the time of version v, K the cells, E = ceil(staleness). Three facts hold for every schedule:
1. A cell-second with n rollouts on the cell gives each 1/s(n) of progress and costs each 1/n cell-seconds. Let
   g be the lower convex hull of the points (1/s(n), 1/n) and (0, 0). A rollout of work L that has D seconds
   costs at least D g(L / D) cell-seconds (Jensen), and it cannot be done if L > D.
2. Batch s is dispatched at T_{s-E} at the earliest and must be trained by T_{s+1}; each moment lies in at most
   1 + E of these windows, so sum_s D_s <= (1 + E) T. Grading, its last micro-step and the optimizer come after
   its last rollout and are no part of a rollout's D.
3. Training costs its cell-seconds, and the optimizer one cell its seconds: K T >= training + sum of 1.
Then for every price p >= 0: K T >= training + sum_s min_D (cost_s(D) + p D) - p (1 + E) T, hence
T >= (training + sum_s min_D (cost_s(D) + p D)) / (K + p (1 + E)). Every p gives a bound; the best of several is taken.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from gyre.schedule.policy import SchedulerSettings
from gyre.simulate.cluster import Cluster
from gyre.simulate.workload import GroupWork, Workload


class Hull:
    """g: least cell-seconds a second for a rate of progress, piecewise linear and convex."""

    def __init__(self, cluster: Cluster, capacity: int) -> None:
        points = [(0.0, 0.0)]
        for load in range(capacity, 0, -1):
            rate, cost = 1.0 / cluster.slowdown(load), 1.0 / load
            if rate <= points[-1][0]:
                continue
            while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-1], (rate, cost)):
                points.pop()
            points.append((rate, cost))
        self._points = points

    def at(self, rate: float) -> float:
        """Cell-seconds a second; infinite above the speed of a lone rollout."""
        points = self._points
        if rate > points[-1][0] * (1 + 1e-9):
            return math.inf
        for left, right in pairwise(points):
            if rate <= right[0]:
                return left[1] + (rate - left[0]) * _slope(left, right)
        return points[-1][1]


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


class _Batch:
    """One batch: its rollouts, longest first, and what comes after the last of them."""

    def __init__(self, groups: Sequence[GroupWork], cluster: Cluster, hull: Hull) -> None:
        self._lengths = sorted((length for group in groups for length in group.rollouts_s), reverse=True)
        self.after_s = cluster.grading_s + cluster.optimizer_s + min(min(group.micro_steps_s) for group in groups)
        self._hull, self._cheapest = hull, hull.at(hull._points[1][0]) / hull._points[1][0]
        self._total, self._full_rate = sum(self._lengths), hull._points[1][0]

    @property
    def least_s(self) -> float:
        """The shortest window."""
        return self._lengths[0] + self.after_s

    @property
    def most_s(self) -> float:
        """A window that is long enough for everybody to run on full cells."""
        return self._lengths[0] / self._full_rate + self.after_s

    def cost(self, window_s: float) -> float:
        """Cell-seconds of its rollouts at least, given the window."""
        seconds, cost, left = window_s - self.after_s, 0.0, self._total
        for length in self._lengths:
            if length <= seconds * self._full_rate:
                break
            cost += seconds * self._hull.at(min(length / seconds, 1.0))
            left -= length
        return cost + left * self._cheapest


def lower_bound_s(plan: SchedulerSettings, cluster: Cluster, workload: Workload) -> float:
    """Seconds that no policy with strict batches can beat; see the module's proof."""
    size = plan.groups_per_batch
    groups = workload.groups[: plan.steps * size]
    hull = Hull(cluster, plan.cell_capacity)
    batches = [_Batch(groups[at : at + size], cluster, hull) for at in range(0, len(groups), size)]
    training = sum(sum(group.micro_steps_s) for group in groups) + plan.steps * cluster.optimizer_s
    depth = 1 + math.ceil(plan.staleness)
    best = max(training / plan.num_cells, sum(batch.least_s for batch in batches) / depth)
    price, factor = 0.02, 1.6
    # Rises, then falls: climb until it falls, then halve the stride around the best.
    values = {0.0: 0.0} | {price * factor**power: 0.0 for power in range(-4, 14, 2)}
    for price in values:
        values[price] = _bound_at(price, batches, training, num_cells=plan.num_cells, depth=depth)
    for _ in range(5):
        factor = math.sqrt(factor)
        top = max(values, key=lambda one: values[one])
        for price in (top * factor, top / factor):
            values[price] = _bound_at(price, batches, training, num_cells=plan.num_cells, depth=depth)
    return max(best, *values.values())


def _bound_at(price: float, batches: Sequence[_Batch], training: float, *, num_cells: int, depth: int) -> float:
    """The bound that a price of `price` cell-seconds for a second of window gives."""
    least = 0.0
    for batch in batches:
        window = _window(batch, price)
        least += batch.cost(window) + price * window
    return (training + least) / (num_cells + price * depth)


def simple_bound_s(plan: SchedulerSettings, cluster: Cluster, workload: Workload) -> float:
    """The larger of perfect packing on full cells and the longest rollouts over 1 + staleness."""
    size, capacity = plan.groups_per_batch, plan.cell_capacity
    groups = workload.groups[: plan.steps * size]
    rollouts = sum(sum(group.rollouts_s) for group in groups) * cluster.slowdown(capacity) / capacity
    training = sum(sum(group.micro_steps_s) for group in groups)
    packed = (rollouts + training) / plan.num_cells + plan.steps * cluster.optimizer_s
    longest = [max(max(group.rollouts_s) for group in groups[at : at + size]) for at in range(0, len(groups), size)]
    return max(packed, sum(longest) / (1 + plan.staleness) + plan.steps * cluster.optimizer_s)


def _window(batch: _Batch, price: float) -> float:
    """The window whose next second would save `price` cell-seconds or less."""
    low, high = batch.least_s, batch.most_s
    for _ in range(20):
        middle = (low + high) / 2
        saved = batch.cost(middle) - batch.cost(middle + 1.0)
        if saved > price:
            low = middle
        else:
            high = middle
    return high
