"""Every unfinished rollout, and the cell its model calls are routed to.

A live rollout either has exactly one route or waits for one, first come, first served. No cell carries more than its
capacity. The counters are d (dispatched), p (started) and f (terminated) over training and evaluation; the
waterlevel is w = d - f. All orders are orders of arrival or of cell index.
"""

import heapq
from collections.abc import Iterable, Sequence

from gyre.types import RolloutId


class RolloutBook:
    """Live rollouts and their routes."""

    def __init__(self, *, num_cells: int, capacity: int) -> None:
        self.capacity = capacity
        self.dispatched = self.started = self.terminated = 0
        self.waiting: dict[RolloutId, None] = {}
        self.routed: tuple[dict[RolloutId, None], ...] = tuple({} for _ in range(num_cells))
        self._route: dict[RolloutId, int | None] = {}
        self._has_started: set[RolloutId] = set()
        self._since: dict[RolloutId, float] = {}

    @property
    def waterlevel(self) -> int:
        """Unfinished rollouts, w = d - f."""
        return self.dispatched - self.terminated

    @property
    def live(self) -> Iterable[RolloutId]:
        """Unfinished rollouts in order of dispatch."""
        return self._route.keys()

    def route(self, rollout: RolloutId) -> int | None:
        """The cell of a live rollout; None while it waits."""
        return self._route[rollout]

    def is_live(self, rollout: RolloutId) -> bool:
        """Whether it was dispatched and has not terminated."""
        return rollout in self._route

    def age(self, rollout: RolloutId, now: float) -> float | None:
        """Seconds since a live rollout had its first route; None before."""
        since = self._since.get(rollout)
        return None if since is None else now - since

    def room(self, cell: int) -> int:
        """Rollouts that the cell could still take."""
        return self.capacity - len(self.routed[cell])

    def dispatch(self, rollouts: Sequence[RolloutId]) -> None:
        """New rollouts; they wait for a route."""
        for rollout in rollouts:
            assert rollout not in self._route, f"rollout {rollout} dispatched twice"
            self._route[rollout] = None
            self.waiting[rollout] = None
        self.dispatched += len(rollouts)

    def start(self, rollout: RolloutId) -> None:
        """Its harness runs."""
        assert rollout in self._route, f"rollout {rollout} started, but is not live"
        assert rollout not in self._has_started, f"rollout {rollout} started twice"
        self._has_started.add(rollout)
        self.started += 1

    def terminate(self, rollout: RolloutId) -> None:
        """It needs no model call any more: its route and its place are free."""
        assert rollout in self._route, f"rollout {rollout} terminated, but is not live"
        cell = self._route.pop(rollout)
        if cell is None:
            del self.waiting[rollout]
        else:
            del self.routed[cell][rollout]
        self._has_started.discard(rollout)
        self._since.pop(rollout, None)
        self.terminated += 1

    def admit_waiting(self, serving: Sequence[int], now: float) -> list[tuple[RolloutId, int]]:
        """Route waiting rollouts to the least loaded cells of `serving` that have room.

        Of equals the highest cell takes it: it stays in rollout longest, so fewer routes change later.
        """
        admitted = []
        # Least loaded first, then the highest: a heap, as a whole batch may be admitted to many cells at once.
        cells = [(-self.room(cell), -cell) for cell in serving if self.room(cell) > 0]
        heapq.heapify(cells)
        while self.waiting and cells:
            room, cell = -cells[0][0], -cells[0][1]
            rollout = next(iter(self.waiting))
            del self.waiting[rollout]
            self._since.setdefault(rollout, now)
            self._set(rollout, cell)
            admitted.append((rollout, cell))
            if room > 1:
                heapq.heapreplace(cells, (1 - room, -cell))
            else:
                heapq.heappop(cells)
        return admitted

    def empty_cell(self, source: int, destinations: Sequence[int]) -> list[tuple[RolloutId, int]]:
        """Route everything on `source` to `destinations`, filled in the given order."""
        moves = []
        for rollout in list(self.routed[source]):
            cell = next((one for one in destinations if self.room(one) > 0), None)
            assert cell is not None, f"no room for rollout {rollout} of cell {source} on cells {list(destinations)}"
            del self.routed[source][rollout]
            self._set(rollout, cell)
            moves.append((rollout, cell))
        return moves

    def spread(self, cells: Sequence[int]) -> list[tuple[RolloutId, int, int]]:
        """Even the loads of `cells` out, to a difference of one: (rollout, source, destination)."""
        moves = []
        loads = {cell: len(self.routed[cell]) for cell in cells}
        while loads:
            most, least = max(cells, key=loads.__getitem__), min(cells, key=loads.__getitem__)
            if loads[most] - loads[least] < 2:
                break
            # The youngest has the least to carry along.
            rollout = next(reversed(self.routed[most]))
            del self.routed[most][rollout]
            self._set(rollout, least)
            loads[most] -= 1
            loads[least] += 1
            moves.append((rollout, most, least))
        return moves

    def _set(self, rollout: RolloutId, cell: int) -> None:
        self._route[rollout] = cell
        self.routed[cell][rollout] = None
