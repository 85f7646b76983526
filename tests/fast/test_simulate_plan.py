"""The plan: parameters and bytes of a model, layouts that fit, and refusals with the number that breaks it."""

import json
import struct
from math import prod
from pathlib import Path

import pytest

from gyre.config.load import load_settings
from gyre.config.schema import Settings
from gyre.errors import ConfigError
from gyre.program.plan import Candidate, feasible, read_shape, recommend, toml_of
from gyre.simulate.memory import GIB, capacity, memory_of
from gyre.simulate.model import ModelShape
from gyre.types import Layout

ROOT = Path(__file__).parents[2]


def paper(name: str, *overrides: str) -> Settings:
    """A reference configuration."""
    return load_settings(ROOT / "configs" / "paper" / f"{name}.toml", overrides)


def tensor_bytes(path: Path) -> int:
    """Bytes of all tensors, from the header of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return sum(4 * prod(one["shape"]) for name, one in header.items() if name != "__metadata__")


def test_predicted_weights_are_those_of_a_real_model() -> None:
    folder = ROOT / "configs" / "quickstart" / "policy"
    shape = ModelShape.of(json.loads((folder / "config.json").read_text()), source="policy")
    memory = memory_of(shape, Layout(), weight_bytes=4, gpu_bytes=GIB, reserve_bytes=0, micro_step_tokens=512)
    assert memory.weights == tensor_bytes(folder / "model.safetensors")
    assert memory.kv_token == 4 * shape.kv_values_per_token()


def test_reference_models_have_their_names_parameters() -> None:
    assert read_shape(paper("122b-nl2repo")).params == pytest.approx(122e9, rel=0.03)
    assert read_shape(paper("2.4t-nl2repo")).params == pytest.approx(2.4e12, rel=0.03)


def test_sharding_divides_and_capacity_counts_whole_rollouts() -> None:
    shape = read_shape(paper("122b-nl2repo"))
    common = {"weight_bytes": 2, "gpu_bytes": 80 * GIB, "reserve_bytes": 8 * GIB, "micro_step_tokens": 65536}
    one = memory_of(shape, Layout(tp=4, pp=4), **common)
    two = memory_of(shape, Layout(tp=4, pp=8), **common)
    assert two.weights == pytest.approx(one.weights / 2, rel=0.01)
    assert capacity(one, rollout_tokens=65536, engines=2) == 2 * (one.kv // (one.kv_token * 65536))
    assert one.core == one.satellite + one.optimizer + one.snapshot


def test_what_fits_is_listed_and_what_does_not_is_refused_with_its_number() -> None:
    settings = paper("122b-nl2repo")
    layouts = feasible(settings, read_shape(settings))
    assert {2, 4, 8} <= {one.num_cells for one in layouts}
    assert all(one.memory.core <= 80 * GIB and one.cell_capacity >= 1 for one in layouts)
    small = paper("2.4t-nl2repo", "cluster.nodes=8")
    with pytest.raises(ConfigError, match=r"cluster.gpu_memory_gb: wanted at least \d+\.\d for the core in training"):
        feasible(small, read_shape(small))
    long = paper("122b-nl2repo", "cluster.rollout_tokens=100000000")
    with pytest.raises(ConfigError, match=r"to serve one rollout of 100000000 tokens"):
        feasible(long, read_shape(long))


def test_the_least_staleness_that_costs_little_is_recommended() -> None:
    settings = paper("122b-nl2repo")
    shape = read_shape(settings)
    memory = feasible(settings, shape)[0].memory

    def candidate(cells: int, *seconds: float) -> Candidate:
        by_staleness = dict(zip((0.0, 1.0, 2.0), seconds, strict=True))
        return Candidate(layout=Layout(), num_cells=cells, memory=memory, cell_capacity=3, seconds=by_staleness)

    slow, fast = candidate(2, 200.0, 102.0, 101.0), candidate(4, 150.0, 120.0, 100.0)
    assert recommend([slow, fast]) == (slow, 1.0)
    assert "staleness = 1.0" in toml_of(slow, 1.0) and "num_cells = 2" in toml_of(slow, 1.0)
