"""Rules of the shared-memory transport and of the weight shelf."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gyre.errors import TransportError
from gyre.fabric import shm
from gyre.fabric.shm import ShmTransport
from gyre.fabric.weights import WeightShelf, fingerprint_of, pull_weights


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[ShmTransport]:
    transport = ShmTransport("test", tmp_path)
    yield transport
    transport.close()
    assert list(tmp_path.iterdir()) == []


def soon() -> float:
    return time.monotonic() + 10


def test_a_reader_gets_the_ranges_it_asks_for(owner: ShmTransport, tmp_path: Path) -> None:
    region = owner.register([memoryview(b"abcdef"), memoryview(b"ghij")])
    reader, into = ShmTransport("reader", tmp_path), bytearray(5)
    reader.pull(owner.describe(region), memoryview(into), [(8, 2), (0, 3)], soon())
    assert bytes(into) == b"ijabc"
    reader.acknowledge(owner.describe(region))
    reader.acknowledge(owner.describe(region))
    assert owner.acknowledged(region) == 2


@pytest.mark.parametrize("ranges", [[(0, 11)], [(8, 3)], [(-1, 3)], [(0, 4)]])
def test_ranges_outside_the_region_or_the_destination_are_refused(
    owner: ShmTransport, ranges: list[tuple[int, int]]
) -> None:
    region = owner.register([memoryview(b"abcdefghij")])
    with pytest.raises(TransportError, match="do not fit"):
        owner.pull(owner.describe(region), memoryview(bytearray(3)), ranges, soon())


def test_a_released_region_is_refused(owner: ShmTransport) -> None:
    region = owner.register([memoryview(b"abc")])
    description = owner.describe(region)
    owner.release(region)
    owner.release(region)
    for act in (
        lambda: owner.pull(description, memoryview(bytearray(3)), None, soon()),
        lambda: owner.acknowledge(description),
    ):
        with pytest.raises(TransportError, match="gone"):
            act()


def test_a_release_during_a_pull_is_noticed_at_its_end(owner: ShmTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    region = owner.register([memoryview(b"abcd")])
    monkeypatch.setattr(shm, "CHUNK_BYTES", 2)
    looks: list[float] = []

    def look_at_clock() -> float:
        looks.append(0.0)
        if len(looks) == 2:
            owner.release(region)
        return 0.0

    monkeypatch.setattr(shm.time, "monotonic", look_at_clock)
    with pytest.raises(TransportError, match="is released"):
        owner.pull(owner.describe(region), memoryview(bytearray(4)), None, 10.0)


def test_another_generation_under_the_same_name_is_refused(owner: ShmTransport, tmp_path: Path) -> None:
    region = owner.register([memoryview(b"abc")])
    path = tmp_path / region.name
    data = bytearray(path.read_bytes())
    data[8:16] = (region.generation + 1).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(TransportError, match=f"wanted {region.generation}"):
        owner.pull(owner.describe(region), memoryview(bytearray(3)), None, soon())


def test_a_pull_past_its_deadline_is_refused(owner: ShmTransport) -> None:
    region = owner.register([memoryview(b"abc")])
    with pytest.raises(TransportError, match="time was up"):
        owner.pull(owner.describe(region), memoryview(bytearray(3)), None, time.monotonic() - 1)


def test_a_killed_owner_leaves_nothing_after_the_next_start(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from gyre.fabric.shm import ShmTransport; "
        "ShmTransport('dead', pathlib.Path(sys.argv[1])).register([memoryview(b'abc')]); "
        "print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        ShmTransport("alive", tmp_path)
        assert len(list(tmp_path.iterdir())) == 1, "the owner still lives"
        process.send_signal(signal.SIGKILL)
    ShmTransport("alive", tmp_path)
    assert list(tmp_path.iterdir()) == []


def make_tensors() -> list[tuple[str, torch.Tensor]]:
    """Shapes and dtypes that a model may have, and a view that is not contiguous."""
    return [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7).to(torch.bfloat16)),
        ("c", torch.tensor(2.5)),
        ("d", torch.randn(4, 6).t()),
        ("e", torch.empty(0)),
    ]


def test_pulled_weights_are_those_exposed() -> None:
    shelf, tensors = WeightShelf("test"), make_tensors()
    try:
        pulled = pull_weights(shelf.expose(3, tensors), soon())
        assert [name for name, _ in pulled] == [name for name, _ in tensors]
        for (_, given), (_, found) in zip(tensors, pulled, strict=True):
            assert found.dtype == given.dtype and torch.equal(found, given)
        assert fingerprint_of(pulled) == fingerprint_of(reversed(tensors))
        assert shelf.acknowledged(3) == 1
    finally:
        shelf.close()


def test_the_shelf_keeps_two_versions() -> None:
    shelf = WeightShelf("test")
    try:
        descriptions = [shelf.expose(version, make_tensors()) for version in range(3)]
        with pytest.raises(TransportError, match="gone"):
            pull_weights(descriptions[0], soon())
        assert len(pull_weights(descriptions[1], soon())) == len(pull_weights(descriptions[2], soon())) == 5
    finally:
        shelf.close()


def test_damaged_weights_are_refused() -> None:
    transport = ShmTransport("test")
    shelf = WeightShelf("test", transport)
    try:
        description = shelf.expose(0, make_tensors())
        (path,) = shm.SHARED_MEMORY.glob(f"gyre.test.*.{os.getpid()}.*")
        with path.open("r+b") as file:
            file.seek(shm.DATA_AT)
            file.write(b"\xff")
        with pytest.raises(TransportError, match="arrived as"):
            pull_weights(description, soon())
    finally:
        shelf.close()


@pytest.mark.parametrize("change", ["name", "dtype", "shape", "byte"])
def test_a_fingerprint_covers_name_dtype_shape_and_bytes(change: str) -> None:
    tensor = torch.arange(4, dtype=torch.int32)
    other = {
        "name": ("x", tensor),
        "dtype": ("w", tensor.view(torch.float32)),
        "shape": ("w", tensor.reshape(2, 2)),
        "byte": ("w", tensor + torch.tensor([0, 0, 0, 1], dtype=torch.int32)),
    }[change]
    assert fingerprint_of([("w", tensor)]) != fingerprint_of([other])
