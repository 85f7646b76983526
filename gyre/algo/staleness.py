"""How old the sampled tokens of a step are, in policy versions."""

import numpy as np

from gyre.types import Int32


def staleness(versions: Int32, trained_version: int) -> tuple[float, int]:
    """Mean and maximum of `trained_version - versions` over tokens, shape (n,); (0.0, 0) for none."""
    if len(versions) == 0:
        return 0.0, 0
    ages = trained_version - np.asarray(versions, dtype=np.int64)
    return float(ages.mean()), int(ages.max())
