"""The advantage of a rollout relative to its group.

A_i = (r_i - mean(r)) / (std(r) + 0.01), with the population deviation: the group baseline of GRPO
(arXiv 2402.03300, section 4.1.2) with an epsilon that keeps a group of nearly equal rewards from being
blown up. `none` leaves the division out, as in Dr. GRPO (arXiv 2503.20783). Who belongs to the group (what
was dropped, what was graded zero) is decided before this.
"""

import numpy as np

from gyre.config.choices import AdvantageScale
from gyre.types import Float32

STD_EPSILON = 1e-2


def group_advantages(rewards: Float32, scale: AdvantageScale | str = AdvantageScale.STD) -> Float32:
    """Advantages of one group, shape (G,) like `rewards`, computed in float64.

    A group with fewer than two members, or whose rewards are all equal, has nothing to compare: exact
    zeros. Raises ValueError for an unknown scale.
    """
    scale = AdvantageScale(scale)
    values = np.asarray(rewards, dtype=np.float64)
    assert values.ndim == 1 and np.isfinite(values).all(), rewards
    if len(values) < 2 or values.min() == values.max():
        return np.zeros(len(values), dtype=np.float32)
    centred = values - values.mean()
    if scale is AdvantageScale.STD:
        centred /= values.std() + STD_EPSILON
    return centred.astype(np.float32)
