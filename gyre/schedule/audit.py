"""Every invariant of the scheduler's state, checked as a whole. Tests call it after each event.

It reads and never changes. A violation is an AssertionError with the values that contradict each other.
"""

from gyre.schedule.cells import ON_THE_WAY, CellState
from gyre.schedule.policy import dispatch_bound
from gyre.schedule.scheduler import Scheduler


def audit(scheduler: Scheduler) -> None:
    """Raise AssertionError if any invariant is broken. An aborted schedule keeps no promises."""
    if scheduler.is_aborted:
        return
    _audit_routes(scheduler)
    _audit_counters(scheduler)
    _audit_cells(scheduler)
    _audit_batches(scheduler)


def _audit_routes(scheduler: Scheduler) -> None:
    """Each live rollout has one route or waits; only cells in rollout hold routes; none is over its capacity."""
    books = scheduler.rollouts
    places: dict[str, list[str]] = {rollout: [] for rollout in books.live}
    for cell in scheduler.cells:
        routed = books.routed[cell.index]
        assert not routed or cell.is_in_rollout, f"cell {cell.index} is {cell.state} and holds {list(routed)}"
        assert len(routed) <= books.capacity, f"cell {cell.index} holds {len(routed)} of {books.capacity}"
        for rollout in routed:
            assert rollout in places, f"cell {cell.index} holds {rollout}, which is not live"
            assert books.route(rollout) == cell.index, f"{rollout} is on {cell.index}, routed {books.route(rollout)}"
            places[rollout].append(f"cell {cell.index}")
    for rollout in books.waiting:
        assert rollout in places, f"{rollout} waits, but is not live"
        assert books.route(rollout) is None, f"{rollout} waits, but is routed to {books.route(rollout)}"
        places[rollout].append("waiting")
    for rollout, found in places.items():
        assert len(found) == 1, f"rollout {rollout} is at {found}"
    for cell in scheduler.cells:
        if cell.index in scheduler.open_cells and books.waiting:
            assert books.room(cell.index) == 0, f"{len(books.waiting)} wait, cell {cell.index} has room"


def _audit_counters(scheduler: Scheduler) -> None:
    """d, p, f and w agree with the live rollouts; dispatch keeps its bound."""
    books, settings = scheduler.rollouts, scheduler.settings
    num_live = len(list(books.live))
    assert books.waterlevel == num_live, f"w = {books.waterlevel}, live are {num_live}"
    assert 0 <= books.terminated <= books.dispatched, (books.terminated, books.dispatched)
    assert 0 <= books.started <= books.dispatched, (books.started, books.dispatched)
    bound = dispatch_bound(settings, scheduler.version)
    assert scheduler.groups_dispatched <= bound, f"{scheduler.groups_dispatched} groups dispatched, bound {bound}"


def _audit_cells(scheduler: Scheduler) -> None:
    """Training is a prefix, one cell is on its way at most, and unfinished rollouts have a cell in rollout."""
    states = [cell.state for cell in scheduler.cells]
    text = ", ".join(states)
    members = sum(state is CellState.TRAINING for state in states)
    assert all(state is CellState.TRAINING for state in states[:members]), f"training is no prefix: {text}"
    on_the_way = [index for index, state in enumerate(states) if state in ON_THE_WAY]
    assert on_the_way in ([], [members]), f"cells leave out of order: {text}"
    assert scheduler.is_closed <= (not members and not on_the_way), f"step is closed, yet: {text}"
    for cell in scheduler.cells:
        if cell.state is CellState.PUBLISHING:
            is_waiting = scheduler.is_closed or cell.is_still_draining or cell.index in scheduler.staying
            assert is_waiting, f"cell {cell.index} waits for nothing: {text}"
    if scheduler.rollouts.waterlevel > 0:
        assert any(cell.is_in_rollout for cell in scheduler.cells), f"nobody serves the rollouts: {text}"


def _audit_batches(scheduler: Scheduler) -> None:
    """The current batch's ledger is whole; finished means that all is done."""
    settings = scheduler.settings
    assert 0 <= scheduler.version <= max(settings.steps, 0), (scheduler.version, settings.steps)
    batch = scheduler.batch
    if batch is not None:
        first = batch.step * settings.groups_per_batch
        assert all(first <= group < first + batch.num_groups for group in batch.groups), batch
        assert sum(batch.groups.values()) == batch.num_ready, batch
        assert all(0 <= index < batch.num_ready for index in batch.claimed), batch
        assert all(batch.claimed.get(index) == cell for index, cell in batch.done.items()), batch
        assert batch.is_done or not scheduler.is_closed, f"step {batch.step} closed too early: {batch}"
    if scheduler.is_finished:
        assert scheduler.version == settings.steps, (scheduler.version, settings.steps)
