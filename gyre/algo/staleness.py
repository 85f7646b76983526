"""How old the sampled tokens are, in policy versions, and rows without the older ones."""

from dataclasses import replace

import numpy as np

from gyre.types import Int32, TreeRow


def staleness(versions: Int32, trained_version: int) -> tuple[float, int]:
    """Mean and maximum of `trained_version - versions` over tokens, shape (n,); (0.0, 0) for none."""
    if len(versions) == 0:
        return 0.0, 0
    ages = trained_version - np.asarray(versions, dtype=np.int64)
    return float(ages.mean()), int(ages.max())


def keep_newest(row: TreeRow) -> TreeRow:
    """The row with only those targets that the newest version among them sampled; all tokens stay as context.

    The means of the loss are then over the targets that are left. A row of one version is returned as it is.
    """
    if len(row.versions) == 0 or row.versions.min() == row.versions.max():
        return row
    kept = row.versions == row.versions.max()
    return replace(
        row,
        num_targets=int(kept.sum()),
        edge_source=row.edge_source[kept],
        edge_token=row.edge_token[kept],
        behavior_logprobs=row.behavior_logprobs[kept],
        versions=row.versions[kept],
    )
