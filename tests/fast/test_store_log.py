"""The log keeps what was written whole: torn tails are cut, damage is named, a full disk leaves it as it was."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.errors import StoreError
from gyre.store.log import FRAME, LogWriter, read_frame, read_frames

PAYLOADS = [b"first", b"", b"third, and longer than the others"]


def written(path: Path) -> list[int]:
    log = LogWriter(path)
    offsets = [log.append(payload) for payload in PAYLOADS]
    log.close()
    return offsets


def contents(path: Path) -> list[bytes]:
    return [payload for _, payload in read_frames(path)]


def test_frames_are_read_back_in_order_and_by_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    offsets = written(path)
    assert list(read_frames(path)) == list(zip(offsets, PAYLOADS, strict=True))
    assert [read_frame(path, offset) for offset in offsets] == PAYLOADS


def test_a_tail_torn_at_any_byte_is_cut_and_the_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    whole = written(path)[-1]
    full = path.read_bytes()
    for size in range(whole + 1, len(full)):
        path.write_bytes(full[:size])
        assert contents(path) == PAYLOADS[:2]
        log = LogWriter(path)
        assert log.cut_bytes == size - whole
        log.append(b"next")
        log.close()
        assert contents(path) == [*PAYLOADS[:2], b"next"]


@pytest.mark.parametrize("tail", [b"\0" * 64, b"gyr1" + b"\xff" * 40, b"noise"])
def test_a_tail_that_never_was_a_frame_is_torn(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "a.log"
    written(path)
    path.write_bytes(path.read_bytes() + tail)
    assert contents(path) == PAYLOADS
    log = LogWriter(path)
    assert log.cut_bytes == len(tail)
    log.close()


@pytest.mark.parametrize("where", ["magic", "length", "checksum", "payload"])
def test_damage_before_the_end_is_named_and_nothing_is_cut(tmp_path: Path, where: str) -> None:
    path = tmp_path / "a.log"
    offset = written(path)[0]
    data = bytearray(path.read_bytes())
    data[offset + {"magic": 0, "length": 7, "checksum": 8, "payload": FRAME.size}[where]] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(StoreError, match=f"damaged at byte {offset}:"):
        LogWriter(path)
    assert path.read_bytes() == bytes(data)


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_payloads_that_look_like_frames_are_only_payloads(payloads: list[bytes]) -> None:
    path = Path(f"/proc/self/fd/{os.memfd_create('log')}")
    log = LogWriter(path)
    try:
        inner = [FRAME.pack(b"gyr1", len(payload), 0) + payload for payload in payloads]
        for payload in inner:
            log.append(payload)
        assert contents(path) == inner
    finally:
        log.close()
        os.close(int(path.name))


def test_a_full_disk_names_the_folder_and_leaves_the_log_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.log"
    log = LogWriter(path)
    log.append(b"kept")
    write, calls = os.write, []

    def full(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return write(fd, data[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gyre.store.log.os.write", full)
    with pytest.raises(StoreError, match=f"No space left.*free some space in {tmp_path}"):
        log.append(b"lost")
    monkeypatch.undo()
    log.append(b"after")
    log.close()
    assert contents(path) == [b"kept", b"after"]
