"""Advantages, GSPO weights, packing, the row format and staleness."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gyre.algo.advantage import STD_EPSILON, group_advantages
from gyre.algo.packing import pack
from gyre.algo.rows import decode_rows, encode_rows
from gyre.algo.staleness import staleness
from gyre.types import TreeRow


def row(rollout: str = "0.0", num_tokens: int = 3, num_targets: int = 2, advantage: float = 0.1) -> TreeRow:
    def numbers(count: int) -> np.ndarray:
        return np.arange(count, dtype=np.int32)

    return TreeRow(
        rollout=rollout,
        advantage=advantage,
        num_targets=num_targets,
        tokens=numbers(num_tokens),
        positions=numbers(num_tokens),
        visible_until=numbers(num_tokens) + 1,
        edge_source=numbers(num_targets),
        edge_token=numbers(num_targets),
        behavior_logprobs=-numbers(num_targets).astype(np.float32) / 3,
        versions=numbers(num_targets),
    )


def test_advantages_are_centred_and_divided_by_the_population_deviation() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 0.0], dtype=np.float32)
    expected = np.array([-0.5, 0.5, 0.5, -0.5]) / (0.5 + STD_EPSILON)
    assert np.allclose(group_advantages(rewards, "std"), expected)
    assert np.allclose(group_advantages(rewards, "none"), [-0.5, 0.5, 0.5, -0.5])


@pytest.mark.parametrize("rewards", [[], [0.7], [0.1] * 7])
def test_a_group_with_nothing_to_compare_has_zero_advantages(rewards: list[float]) -> None:
    assert group_advantages(np.array(rewards, dtype=np.float32), "std").tolist() == [0.0] * len(rewards)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=20),
    max_rollouts=st.integers(1, 5),
    max_tokens=st.integers(1, 60),
)
def test_packing_keeps_order_loses_nothing_and_keeps_its_bounds(
    lengths: list[int], max_rollouts: int, max_tokens: int
) -> None:
    rows = [row(rollout=f"0.{place}", num_tokens=length) for place, length in enumerate(lengths)]
    packed = pack(rows, max_rollouts, max_tokens)
    assert [kept for micro_step in packed for kept in micro_step] == rows
    for micro_step in packed:
        assert 1 <= len(micro_step) <= max_rollouts
        assert len(micro_step) == 1 or sum(len(kept.tokens) for kept in micro_step) <= max_tokens


int32s = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), advantage=st.floats(allow_nan=False), rollout=st.text(max_size=8))
def test_rows_survive_the_way_through_bytes(data: st.DataObject, advantage: float, rollout: str) -> None:
    rows = []
    for _ in range(data.draw(st.integers(0, 3))):
        num_tokens, num_targets = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
        tokens = [data.draw(arrays.arrays(np.int32, num_tokens, elements=int32s)) for _ in range(3)]
        edges = [data.draw(arrays.arrays(np.int32, num_targets, elements=int32s)) for _ in range(3)]
        rows.append(
            TreeRow(
                rollout=rollout,
                advantage=advantage,
                num_targets=num_targets,
                tokens=tokens[0],
                positions=tokens[1],
                visible_until=tokens[2],
                edge_source=edges[0],
                edge_token=edges[1],
                versions=edges[2],
                behavior_logprobs=data.draw(arrays.arrays(np.float32, num_targets)),
            )
        )
    back = decode_rows(encode_rows(rows))
    assert len(back) == len(rows)
    for given_row, got_row in zip(rows, back, strict=True):
        for name in TreeRow.__slots__:
            wanted, got = getattr(given_row, name), getattr(got_row, name)
            if isinstance(wanted, np.ndarray):
                assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes()
            else:
                assert got == wanted


def test_rows_of_another_format_or_length_are_refused() -> None:
    data = encode_rows([row()])
    with pytest.raises(ValueError, match="begin with"):
        decode_rows(b"XXXX" + data[4:])
    with pytest.raises(ValueError):
        decode_rows(data[:-4])
    with pytest.raises(ValueError, match="their header says"):
        decode_rows(data + b"0000")


def test_staleness_is_mean_and_maximum_age_in_versions() -> None:
    assert staleness(np.array([3, 4, 5], dtype=np.int32), 5) == (1.0, 2)
    assert staleness(np.array([], dtype=np.int32), 5) == (0.0, 0)
