"""Which task a group works on: a shuffled pass over the tasks, then another, as a function of (seed, group).

No cursor is kept: group `g` gets the same task in every run with the same seed and task list, so a resumed
run cannot skip or repeat one.
"""

import hashlib
import random


def task_of_group(num_tasks: int, *, seed: int, group: int) -> int:
    """Index of the task that group `group` (0, 1, ...) works on."""
    epoch, place = divmod(group, num_tasks)
    order = list(range(num_tasks))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order[place]


def turn_seed(*, seed: int, rollout: str, turn: int) -> int:
    """Sampling seed of a turn: 31 bits that depend on the run's seed, the rollout and the turn alone."""
    digest = hashlib.blake2b(f"{seed}/{rollout}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
