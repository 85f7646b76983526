"""A run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open. A pure function of its history.

Four groups of tracks: cells (their phases, micro-steps inside), weights (loads of each cell, steps), rollouts (one a
rollout: queue, model calls, tools, grading; calls that overlap lie on further lanes) and counters (waterlevel, cells
in rollout). Times are microseconds since the run first began. Format: "Trace Event Format", the JSON object form.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from gyre.schedule.cells import CellState
from gyre.store import records
from gyre.store.store import write_whole
from gyre.watch.history import History, RolloutPast, TurnPast, read_history, step_of

CELLS, WEIGHTS, ROLLOUTS, COUNTERS = 1, 2, 3, 4
GROUPS = {CELLS: "cells", WEIGHTS: "steps and weights", ROLLOUTS: "rollouts", COUNTERS: "counters"}
STEPS_TRACK = 0
LANES = 64
"""Room for the lanes of one rollout: its tracks are numbered from LANES times its place."""

Event = dict[str, object]


def write_timeline(folder: Path, out: Path) -> int:
    """Write the trace of the run in `folder` to `out`; returns the number of its events. Raises StoreError."""
    events = trace_events(read_history(folder))
    write_whole(out, msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(events)


def trace_events(history: History) -> list[Event]:
    """All events; on each track slices nest and none is negative."""
    return [*_groups(), *_cells(history), *_weights(history), *_rollouts(history), *_counters(history)]


def _groups() -> Iterator[Event]:
    for pid, name in GROUPS.items():
        yield {"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": 0, "ts": 0, "name": "process_sort_index", "args": {"sort_index": pid}}


def _track(pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": "thread_name", "args": {"name": name}}


def _slice(pid: int, tid: int, name: str, begin: float, end: float, args: dict[str, object] | None = None) -> Event:
    start = round(begin * 1e6)
    event: Event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start}
    event["dur"] = max(0, round(end * 1e6) - start)
    if args:
        event["args"] = args
    return event


def _cells(history: History) -> Iterator[Event]:
    free: dict[int, float] = {}
    for cell in sorted({phase.cell for phase in history.phases}):
        yield _track(CELLS, cell, f"cell {cell}" + (" (core)" if cell == 0 else ""))
    for phase in history.phases:
        yield _slice(CELLS, phase.cell, phase.state.value, phase.begin, history.closed(phase))
    training = [phase for phase in history.phases if phase.state is CellState.TRAINING]
    for at in history.micro_steps:
        record = at.record
        assert isinstance(record, records.MicroStepTrained)
        inside = next((p for p in training if p.cell == record.cell and p.begin <= at.time <= history.closed(p)), None)
        if inside is None:
            continue
        # The cell's seconds do not count the way of the message: slices that would overlap are cut.
        begin = max(at.time - record.seconds, inside.begin, free.get(record.cell, 0.0))
        free[record.cell] = at.time
        figures = {"targets": record.num_targets, "loss": record.loss, "max_logprob_gap": record.max_logprob_gap}
        yield _slice(CELLS, record.cell, f"micro-step {record.step}/{record.index}", begin, at.time, figures)


def _weights(history: History) -> Iterator[Event]:
    yield _track(WEIGHTS, STEPS_TRACK, "steps")
    before = history.lives[0].time
    for at in history.steps:
        step = step_of(at)
        args: dict[str, object] = {"version": step.version, "reward": step.reward_mean, "grad_norm": step.grad_norm}
        yield _slice(WEIGHTS, STEPS_TRACK, f"step {step.step}", min(before, at.time), at.time, args)
        yield _slice(WEIGHTS, STEPS_TRACK, "reduce and apply", max(before, at.time - step.seconds), at.time)
        before = at.time
    for cell in sorted({phase.cell for phase in history.phases}):
        yield _track(WEIGHTS, cell + 1, f"loads of cell {cell}")
    for phase in history.phases:
        if phase.state in (CellState.LOADING, CellState.JOINING):
            name = "engine loads" if phase.state is CellState.LOADING else "replica joins"
            yield _slice(WEIGHTS, phase.cell + 1, name, phase.begin, history.closed(phase))


def _rollouts(history: History) -> Iterator[Event]:
    for place, one in enumerate(history.rollouts, start=1):
        yield from _rollout(one, place * LANES, end=one.end if one.end is not None else history.end)


def _rollout(one: RolloutPast, tid: int, *, end: float) -> Iterator[Event]:
    yield _track(ROLLOUTS, tid, f"{one.rollout} {one.task}")
    args: dict[str, object] = {"task": one.task, "purpose": one.purpose, "reward": one.reward, "error": one.error}
    yield _slice(ROLLOUTS, tid, f"rollout {one.rollout}", one.begin, end, args)
    running, ended = one.entered("running"), one.entered("ended")
    if running is not None:
        yield _slice(ROLLOUTS, tid, "queue and start", one.begin, running)
        yield from _turns(one, tid, running, ended if ended is not None else end)
    if ended is not None:
        yield _slice(ROLLOUTS, tid, "grading", ended, end)
    for time, move in one.moves:
        yield {
            "ph": "i", "s": "t", "pid": ROLLOUTS, "tid": tid, "ts": round(time * 1e6),
            "name": f"moved: cell {move.source} to {move.destination}", "args": {"tokens_kept": move.tokens_kept},
        }  # fmt: skip


def _turns(one: RolloutPast, tid: int, begin: float, end: float) -> Iterator[Event]:
    """Model calls and, on the first lane, the tools between them."""
    lanes = [begin]
    for turn in sorted(one.turns, key=lambda turn: turn.begin):
        if not turn.record.time:
            continue  # a run of before turns had a time
        start, stop = max(begin, turn.begin), min(end, turn.end)
        lane = next((lane for lane, free in enumerate(lanes) if free <= start), len(lanes))
        if stop <= start or lane >= LANES:
            continue
        if lane == len(lanes):
            lanes.append(begin)
            yield _track(ROLLOUTS, tid + lane, f"{one.rollout} lane {lane + 1}")
        if lane == 0 and start > lanes[0]:
            yield _slice(ROLLOUTS, tid, "tools", lanes[0], start)
        lanes[lane] = stop
        yield from _turn(turn, tid + lane, start, stop)
    if end > lanes[0]:
        yield _slice(ROLLOUTS, tid, "tools", lanes[0], end)


def _turn(turn: TurnPast, tid: int, begin: float, end: float) -> Iterator[Event]:
    record = turn.record
    args: dict[str, object] = {
        "tokens": len(record.output_tokens) // 4,
        "new_context": len(record.context_tokens) // 4,
        "cached": record.cached_tokens,
        "versions": sorted({version for _, _, version in record.spans}),
        "finish": record.finish,
        "moved": record.moved,
        "waited_s": record.waited_s,
    }
    yield _slice(ROLLOUTS, tid, f"model call {record.turn}", begin, end, args)
    if record.waited_s > 0:
        # How long is known, not when: it is drawn at the beginning, where nearly all of it lies.
        yield _slice(ROLLOUTS, tid, "waits for a cell", begin, min(end, begin + record.waited_s))


def _counters(history: History) -> Iterator[Event]:
    for time, waterlevel, serving in history.levels:
        common: Event = {"ph": "C", "pid": COUNTERS, "tid": 0, "ts": round(time * 1e6)}
        yield {**common, "name": "waterlevel", "args": {"rollouts": waterlevel}}
        yield {**common, "name": "cells in rollout", "args": {"cells": serving}}
