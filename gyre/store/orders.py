"""What people tell a running run, as small files in its folder: pause, resume, checkpoint, stop.

An order is a file under `orders/`, put there whole and removed by the run's front once it has taken it; that it
is gone is the answer. So it works from any machine that sees the folder, needs no port, and one who may write
into the folder may order. What lies there when a front starts was meant for an earlier life and is dropped.
"""

import os
import time
from enum import StrEnum
from pathlib import Path

from gyre.errors import DeadlineError, StoreError
from gyre.store.store import write_whole

ORDERS = "orders"
POLL_S = 0.1


class Order(StrEnum):
    """What a run can be told."""

    PAUSE = "pause"
    """Dispatch no new group; what runs goes on."""
    RESUME = "resume"
    """Dispatch again, and do not stop."""
    CHECKPOINT = "checkpoint"
    """Keep a checkpoint of the step that is trained next."""
    STOP = "stop"
    """Stop in order after this step, with a checkpoint; at once where no step is being trained."""
    STOP_NOW = "stop-now"
    """Stop in order at once."""


WORDS = frozenset(order.value for order in Order)


def give_order(folder: Path, order: Order) -> Path:
    """Leave an order for the run in `folder`; returns the file that its front will remove."""
    place = folder / ORDERS
    try:
        place.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot order anything in {folder}: {error}") from error
    path = place / f"{time.time_ns():020}-{os.getpid()}.{order.value}"
    write_whole(path, b"")
    return path


def await_taken(path: Path, *, wait_s: float) -> None:
    """Until the front has taken the order at `path`; DeadlineError (and the order is withdrawn) if it does not."""
    until = time.monotonic() + wait_s
    while path.exists():
        if time.monotonic() > until:
            path.unlink(missing_ok=True)
            raise DeadlineError("the order's taking", seconds=wait_s, missing=f"a living run in {path.parents[1]}")
        time.sleep(POLL_S)


def take_orders(folder: Path) -> list[Order]:
    """The orders that lie in `folder`, oldest first, removed. Files that are no orders are left alone."""
    place = folder / ORDERS
    try:
        names = sorted(name for name in os.listdir(place) if not name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {place}: {error}") from error
    taken = []
    for name in names:
        word = name.rpartition(".")[2]
        if word in WORDS:
            (place / name).unlink(missing_ok=True)
            taken.append(Order(word))
    return taken
