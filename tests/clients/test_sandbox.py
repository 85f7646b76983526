"""What a real sandbox lets through and what it leaves behind."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gyre.errors import DeadlineError, EvaluationError, SandboxError
from gyre.sandbox.lease import Process, reap_stale
from gyre.sandbox.sandbox import Sandboxes
from gyre.sandbox.spec import Limits, SandboxSpec
from gyre.tasks.harbor import load_task
from gyre.tasks.verifier import grade, nop, oracle, pack_folder
from tests.clients.fake_front import HELLO, REPOSITORY

BASE = SandboxSpec(limits=Limits(disk_mb=8, processes=24))


def with_sandboxes(root: Path, body: Callable[[Sandboxes], Awaitable[None]]) -> None:
    """Run `body` with a pool, then check that nothing is left of it."""

    async def run() -> None:
        pool = Sandboxes(run="test", root=root)
        try:
            await body(pool)
        finally:
            await pool.close()

    asyncio.run(run())
    assert list(root.iterdir()) == []


def test_user_inside_has_no_rights_and_sees_no_home(tmp_path: Path) -> None:
    async def body(pool: Sandboxes) -> None:
        box = await pool.start(BASE)
        script = "grep -E 'CapEff|NoNewPrivs' /proc/self/status; id -u; ls /root /home; touch /usr/x /etc/x /tests/x /x"
        done = await box.exec(["sh", "-c", script], deadline_s=10)
        words = done.stdout.decode()
        assert "CapEff:\t0000000000000000" in words and "NoNewPrivs:\t1" in words and str(box.uid) in words
        for name in ("/root", "/home", "/usr/x", "/etc/x", "/tests/x", "'/x'"):
            assert name in done.stderr.decode(), name

    with_sandboxes(tmp_path, body)


def test_gateway_socket_is_the_only_network(tmp_path: Path) -> None:
    async def body(pool: Sandboxes) -> None:
        box = await pool.start(SandboxSpec(read_only=(Path(sys.base_prefix),)))
        listener = await box.listen(8765)
        outside = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = outside.sockets[0].getsockname()[1]
        script = (
            "import socket\n"
            f"for where in (('127.0.0.1', 8765), ('127.0.0.1', {port}), ('1.1.1.1', 80)):\n"
            "    try: socket.create_connection(where, 2); print('open')\n"
            "    except OSError as error: print(type(error).__name__)\n"
            "print(sorted(name for _, name in socket.if_nameindex()))\n"
        )
        done = await box.exec([f"{sys.base_prefix}/bin/python3", "-I", "-S", "-c", script], deadline_s=20)
        assert done.stdout.decode().split("\n")[:4] == ["open", "ConnectionRefusedError", "OSError", "['lo']"], done
        listener.close()
        outside.close()

    with_sandboxes(tmp_path, body)


def test_reap_kills_double_forks_that_ignore_signals(tmp_path: Path) -> None:
    async def body(pool: Sandboxes) -> None:
        box = await pool.start(BASE)
        await box.exec(
            ["sh", "-c", "(setsid sh -c 'trap \"\" TERM HUP INT; sleep 1000; sleep 1000' &) ; sleep 999 &"],
            deadline_s=5,
        )
        await box.reap()
        done = await box.exec(["sh", "-c", "echo /proc/[0-9]*"], deadline_s=5)
        assert len(done.stdout.split()) == 2, done

    with_sandboxes(tmp_path, body)


def test_deadline_of_a_command_is_kept_whatever_holds_its_output(tmp_path: Path) -> None:
    async def body(pool: Sandboxes) -> None:
        box = await pool.start(BASE)
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=r"did not end within 0\.5 s"):
            await box.exec(["sh", "-c", "sleep 100 & wait"], deadline_s=0.5)
        done = await box.exec(["sh", "-c", "sleep 100 & echo started"], deadline_s=5)
        assert done.stdout == b"started\n" and time.monotonic() - began < 5

    with_sandboxes(tmp_path, body)


def test_limits_bind(tmp_path: Path) -> None:
    async def body(pool: Sandboxes) -> None:
        box = await pool.start(BASE)
        filled = await box.exec(
            ["sh", "-c", "for i in 1 2 3; do head -c 5000000 /dev/zero > f$i; done; du -sm ."], deadline_s=20
        )
        assert b"No space left" in filled.stderr and int(filled.stdout.split()[0]) <= 8
        script = "for i in $(seq 60); do sleep 20 & done; wait"
        if not box.rootless:
            assert b"fork" in (await box.exec(["sh", "-c", script], deadline_s=5)).stderr.lower()
        await box.reap()

    with_sandboxes(tmp_path, body)


def test_copies_come_back_whole_and_are_bounded(tmp_path: Path) -> None:
    async def body(pool: Sandboxes) -> None:
        box = await pool.start(BASE)
        await box.exec(
            [
                "sh",
                "-c",
                "mkdir d; echo x > d/f; ln -s /etc/passwd l; chmod 0 d/f; mkfifo p; head -c 3000000 /dev/urandom > big",
            ],
            deadline_s=5,
        )
        with pytest.raises(SandboxError, match="at most 1000000 bytes"):
            await box.pull("/app", max_bytes=1_000_000)
        archive = await box.pull("/app", max_bytes=16_000_000)
        other = await pool.start(BASE)
        await other.push(archive, "/app")
        done = await other.exec(["sh", "-c", "ls; readlink l; chmod 600 d/f; cat d/f; wc -c < big"], deadline_s=5)
        assert done.stdout.split() == [b"big", b"d", b"l", b"p", b"/etc/passwd", b"x", b"3000000"], done

    with_sandboxes(tmp_path, body)


def test_solution_scores_one_and_nothing_scores_zero(tmp_path: Path) -> None:
    async def body(pool: Sandboxes) -> None:
        task = load_task(HELLO)
        assert (await oracle(task, pool.start, base=BASE)).reward == 1.0
        assert (await nop(task, pool.start, base=BASE)).reward == 0.0

    with_sandboxes(tmp_path, body)


PLANTS = (
    "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt",
    "ln -s /logs/verifier x; ln -s /tests t; ln -s /logs/verifier/reward.json greeting.txt",
    "mkdir y; echo '{\"reward\": 1}' > y/reward.json; mkdir greeting.txt; ln -s / root",
    "echo 'echo 1 > /logs/verifier/reward.txt' > cmp; cp cmp cat; cp cmp test.sh; chmod +x cmp cat test.sh",
    "(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' &)",
)


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_files_do_not_make_a_score(tmp_path: Path, plant: str) -> None:
    async def body(pool: Sandboxes) -> None:
        box = await pool.start(BASE)
        await box.push(pack_folder(HELLO / "environment"), "/app")
        await box.exec(["sh", "-c", plant], deadline_s=5)
        await box.reap()
        snapshot = await box.pull("/app", max_bytes=16 << 20)
        score = await grade(load_task(HELLO), snapshot, pool.start, base=BASE)
        assert score.reward == 0.0, score

    with_sandboxes(tmp_path, body)


@pytest.mark.parametrize(
    "said",
    ["true", "echo '{\"reward\": NaN}' > /logs/verifier/reward.json", "ln -s /etc/passwd /logs/verifier/reward.json"],
)
def test_a_verifier_without_a_reward_is_a_failed_evaluation(tmp_path: Path, said: str) -> None:
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text("")
    (folder / "instruction.md").write_text("x")
    (folder / "tests" / "test.sh").write_text(said + "\n")

    async def body(pool: Sandboxes) -> None:
        with pytest.raises(EvaluationError):
            await nop(load_task(folder), pool.start, base=BASE)

    (tmp_path / "root").mkdir()
    with_sandboxes(tmp_path / "root", body)


OWNER = """
import asyncio, sys
from pathlib import Path
from gyre.sandbox.sandbox import Sandboxes
from gyre.sandbox.spec import SandboxSpec
async def main():
    pool = Sandboxes(run="owner", root=Path(sys.argv[1]))
    while True:
        box = await pool.start(SandboxSpec())
        await box.exec(["sh", "-c", "(setsid sh -c 'trap \\"\\" TERM; sleep 1000' &)"], deadline_s=5)
        print("up", pool.keeper.pid, flush=True)
asyncio.run(main())
"""


def test_nothing_is_left_after_owners_are_killed_at_random(tmp_path: Path) -> None:
    chance, inside = random.Random(7), set()
    for _ in range(30):
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        assert owner.stdout is not None
        keeper = int(owner.stdout.readline().split()[1])
        time.sleep(chance.random() * 0.05)  # Not synchronisation: the moment of the kill is what varies.
        if chance.random() < 0.3:
            os.kill(keeper, signal.SIGKILL)
        owner.kill()
        owner.wait(10)
        owner.stdout.close()
        for path in tmp_path.glob("gyre-owner/*/lease.json"):
            if found := json.loads(path.read_text())["inside"]:
                inside.add((found["pid"], found["start"]))
        reap_stale(tmp_path)
    assert inside
    assert list(tmp_path.iterdir()) == []
    assert _started_for(tmp_path) == []
    end = time.monotonic() + 10
    while left := _alive(inside):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def _started_for(root: Path) -> list[str]:
    """Processes whose command line names something below `root`, other than tests."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if words[0].endswith(b"bwrap") and any(str(root).encode() in word for word in words):
            found.append(path.parent.name)
    return found


def _alive(inside: set[tuple[int, int]]) -> list[int]:
    """Which of these processes still live."""
    return [pid for pid, start in inside if Process(pid=pid, start=start).is_alive()]
