"""Cells from facts: pure, independent of the order of arrival, and naming the ranks that do not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.config.choices import Dtype
from gyre.config.load import load_settings
from gyre.config.schema import Settings
from gyre.errors import PlacementError
from gyre.schedule.placement import describe_placement, memory_estimate, place
from gyre.types import RankFacts, Role

QUICKSTART = load_settings(Path(__file__).parents[2] / "configs" / "quickstart.toml")


def shaped(num_cells: int, tp: int = 1, pp: int = 1) -> Settings:
    return replace(QUICKSTART, placement=replace(QUICKSTART.placement, num_cells=num_cells, tp=tp, pp=pp))


def facts_of(rank: int, **changes: Any) -> RankFacts:
    fact = RankFacts(
        rank=rank,
        local_rank=rank % 4,
        host=f"node{rank // 4}",
        device="cpu",
        memory_bytes=2**30,
        versions={"torch": "2.13.0", "gyre": "1"},
    )
    return replace(fact, **changes)


def test_cells_are_contiguous_blocks_led_by_their_lowest_rank() -> None:
    placement = place([facts_of(rank) for rank in range(6)], shaped(3, tp=2))
    assert [cell.ranks for cell in placement.cells] == [(0, 1), (2, 3), (4, 5)]
    assert placement.leaders == (0, 2, 4)
    assert [cell.role for cell in placement.cells] == [Role.CORE, Role.SATELLITE, Role.SATELLITE]
    assert [placement.cell_of(rank).index for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert placement.prefix_ranks(2) == (0, 1, 2, 3)
    assert placement.hosts == ("node0",) * 4 + ("node1",) * 2


@given(order=st.permutations(range(8)), versions=st.permutations([("torch", "2.13.0"), ("gyre", "1")]))
def test_placement_does_not_depend_on_the_order_of_arrival(order: list[int], versions: list[tuple[str, str]]) -> None:
    settings = shaped(2, tp=2, pp=2)
    first = place([facts_of(rank) for rank in range(8)], settings)
    again = place([facts_of(rank, versions=dict(versions)) for rank in order], settings)
    assert again == first and again.digest() == first.digest()


def test_the_digest_is_stable_and_tells_placements_apart() -> None:
    facts = [facts_of(rank) for rank in range(4)]
    digests = {
        place(facts, shaped(4)).digest(),
        place(facts, shaped(2, tp=2)).digest(),
        place(facts, shaped(2, pp=2)).digest(),
        place([replace(fact, host="other") for fact in facts], shaped(4)).digest(),
    }
    assert len(digests) == 4 and all(len(digest) == 64 for digest in digests)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0, 1, 3], "the world has 3; missing: rank 2;"),
        ([0], "the world has 1; missing: ranks 1-3;"),
        ([0, 1, 2, 3, 4, 5], "the world has 6; too many: ranks 4-5;"),
        ([0, 1, 1, 2, 3], "rank 1 reported their facts twice"),
    ],
)
def test_a_world_of_the_wrong_size_names_the_ranks(ranks: list[int], text: str) -> None:
    with pytest.raises(PlacementError, match=text):
        place([facts_of(rank) for rank in ranks], shaped(2, tp=2))


def test_mixed_devices_and_versions_name_the_ranks() -> None:
    facts = [facts_of(rank) for rank in range(4)]
    facts[2] = facts_of(2, device="cuda:2")
    with pytest.raises(PlacementError, match="differ in device: cpu on ranks 0-1, 3; cuda on rank 2"):
        place(facts, shaped(4))
    facts[2] = facts_of(2, versions={"torch": "2.12.0", "gyre": "1"})
    with pytest.raises(PlacementError, match=r"version of torch: 2\.13\.0 on ranks 0-1, 3; 2\.12\.0 on rank 2"):
        place(facts, shaped(4))
    facts[2] = facts_of(2, versions={"gyre": "1"})
    with pytest.raises(PlacementError, match="none on rank 2"):
        place(facts, shaped(4))


def test_a_device_that_was_not_asked_for_is_refused() -> None:
    with pytest.raises(PlacementError, match=r"placement.device is cpu, ranks 0-1 have cuda"):
        place([facts_of(rank, device="cuda") for rank in range(2)], shaped(2))


def test_memory_divides_over_tensor_and_pipeline_ranks() -> None:
    whole, split = memory_estimate(4000, shaped(1)), memory_estimate(4000, shaped(1, tp=2, pp=2))
    assert (whole.engine_bytes, whole.satellite_bytes, whole.core_bytes) == (4000, 8000, 20000)
    assert (split.engine_bytes, split.satellite_bytes, split.core_bytes) == (1000, 2000, 5000)
    half = replace(shaped(1), engine=replace(QUICKSTART.engine, dtype=Dtype.BFLOAT16))
    assert memory_estimate(4000, half).engine_bytes == 2000


def test_the_description_shows_cells_ranks_layout_and_memory() -> None:
    text = describe_placement(shaped(2, tp=2), 4 * 610_000)
    for part in ("2 x 2 ranks = 4 ranks", "tp 2", "cell 1   ranks 2-3, leader 2, satellite", "610,000", "MiB"):
        assert part in text, text
    assert "memory" not in describe_placement(shaped(1))
