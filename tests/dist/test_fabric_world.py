"""Rules of the world, its groups and its role epochs, in one world of four gloo ranks on two pretended nodes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gyre.errors import DeadlineError
from gyre.fabric.world import World
from tests.fakes.settings import make_settings

NUM_RANKS = 4


def rank_environment(rank: int, size: int, port: int, *, local_size: int) -> dict[str, str]:
    """torchrun's variables for a rank that meets the others at an agent's store."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("world")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.dist.fabric_world", str(folder / f"{rank}.json")],
            env=os.environ | rank_environment(rank, NUM_RANKS, store.port, local_size=2)
            | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(NUM_RANKS)
    ]  # fmt: skip
    try:
        assert [rank.wait(120) for rank in ranks] == [0] * NUM_RANKS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def test_gathering_in_two_levels_gives_every_rank_all_values_in_order(seen: list[dict[str, Any]]) -> None:
    assert [one["node"] for one in seen] == [0, 0, 1, 1]
    for one in seen:
        assert one["gathered"] == [f"rank {rank}" for rank in range(NUM_RANKS)]
        assert one["text"] == "tcp://here"


def test_a_rank_that_places_otherwise_is_named_on_every_rank(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert "PlacementError: ranks [3] placed the same facts otherwise" in one["other code"]
        assert one["refused"] == "PlacementError: not enough ranks"


def test_groups_are_the_cell_the_rank_alone_and_each_prefix_of_cells(seen: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(seen):
        assert one["leaders"] == [0, 2]
        assert one["cell"] == ([0, 1] if rank < 2 else [2, 3])
        assert one["self"] == [rank]
        assert one["prefix"] == {"2": [rank % 2, rank % 2 + 2]}
        assert one["core peer"] == rank % 2
        assert one["sum"] == 2 * (rank % 2) + 2


def test_leaders_agree_the_epochs_and_name_who_has_another_order_or_does_not_come(seen: list[dict[str, Any]]) -> None:
    for leader in (seen[0], seen[2]):
        assert leader["epoch 1"] == ["training", "rollout"]
        assert leader["epoch 2"] == ["training", "training"]
        assert leader["epoch 3"] == "RunError: role epoch 3: ranks [2] were given another order than rank 0"
    assert seen[0]["epoch 4"] == "DeadlineError: role epoch 4 did not end within 1 s; missing: ranks 2"
    assert 1.0 <= seen[0]["waited"] < 5.0


def test_a_rank_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in rank_environment(0, 3, store.port, local_size=3).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("gyre.fabric.world.TELL_EVERY_S", 0.4)
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="start did not end within 1 s; missing: ranks 1, 2"):
        World.join(make_settings(Path("model"), num_cells=3), local_rank=0, timeout_s=1.0)
    assert time.monotonic() - began < 10
    assert "missing_ranks=1, 2" in caplog.text
