"""One rollout cell as a processor-sharing server: all its rollouts progress at the speed of its load.

Progress is kept as one virtual clock for the cell, so an arrival, a departure or a change of speed costs
O(log n). Work is in seconds alone on a cell. Nothing here knows the scheduler.
"""

import heapq
import math
from collections.abc import Callable

from gyre.types import RolloutId


class SharedCell:
    """Rollouts on a cell. `is_running` is False while its engine takes weights: nothing progresses."""

    def __init__(self, slowdown: Callable[[int], float]) -> None:
        self._slowdown = slowdown
        self._work, self._now, self.is_running = 0.0, 0.0, False
        self._ends: dict[RolloutId, float] = {}
        self._heap: list[tuple[float, RolloutId]] = []
        self.load_seconds = self.empty_seconds = self.running_seconds = 0.0

    def __len__(self) -> int:
        return len(self._ends)

    def advance(self, now: float) -> None:
        """Let time pass."""
        seconds, self._now = now - self._now, now
        if not self.is_running or seconds <= 0.0:
            return
        load = len(self._ends)
        self.running_seconds += seconds
        self.load_seconds += load * seconds
        if load:
            self._work += seconds / self._slowdown(load)
        else:
            self.empty_seconds += seconds

    def run(self, is_running: bool, now: float) -> None:
        """Its engine answers from now on, or stops answering."""
        self.advance(now)
        self.is_running = is_running

    def put(self, rollout: RolloutId, work_s: float, now: float) -> None:
        """A rollout with `work_s` left arrives."""
        self.advance(now)
        end = self._work + work_s
        self._ends[rollout] = end
        heapq.heappush(self._heap, (end, rollout))

    def take(self, rollout: RolloutId, now: float) -> float:
        """A rollout leaves; returns its work left."""
        self.advance(now)
        return max(self._ends.pop(rollout) - self._work, 0.0)

    def next_end(self) -> tuple[float, RolloutId]:
        """(time, rollout) of the next end if nothing changes; infinite while nothing runs."""
        while self._heap and self._ends.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if not self._heap or not self.is_running:
            return math.inf, ""
        end, rollout = self._heap[0]
        return self._now + max(end - self._work, 0.0) * self._slowdown(len(self._ends)), rollout
