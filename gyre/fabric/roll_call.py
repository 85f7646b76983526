"""Waiting for named ranks at a key-value store, so that whoever does not come can be named.

A collective that times out does not say who was missing. Here each rank leaves a mark before it enters one, and
waits for the marks of the others: what follows then only fails when a rank dies in the middle.
"""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from gyre.errors import DeadlineError

log = logging.getLogger(__name__)


def await_marks(
    store: dist.Store, name: str, ranks: Sequence[int], *, timeout_s: float, tell_every_s: float | None = None
) -> None:
    """Wait until every one of `ranks` has called `leave_mark(store, name, rank)`.

    With `tell_every_s` the missing ranks are logged at that interval. Raises DeadlineError naming them.
    """
    began = time.monotonic()
    left = timeout_s
    while left > 0:
        pause = min(left, tell_every_s or left)
        try:
            store.wait([_key(name, rank) for rank in ranks], timedelta(seconds=pause))
            return
        except dist.DistStoreError:
            left = timeout_s - (time.monotonic() - began)
            if left > 0:
                log.warning(
                    "waiting for=%s seconds=%.0f missing_ranks=%s", name, timeout_s - left, missing(store, name, ranks)
                )
    raise DeadlineError(name, seconds=timeout_s, missing=f"ranks {missing(store, name, ranks)}")


def leave_mark(store: dist.Store, name: str, rank: int) -> None:
    """Say that `rank` has come to `name`."""
    store.set(_key(name, rank), "1")


def erase_mark(store: dist.Store, name: str, rank: int) -> None:
    """Take a mark back once everybody has seen it."""
    store.delete_key(_key(name, rank))


def missing(store: dist.Store, name: str, ranks: Sequence[int]) -> str:
    """The ranks of `ranks` without a mark, as text."""
    return ", ".join(str(rank) for rank in ranks if not store.check([_key(name, rank)]))


def _key(name: str, rank: int) -> str:
    return f"gyre/{name}/{rank}"
