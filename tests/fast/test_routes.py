"""Live model calls survive every change of route with exactly the tokens of an uninterrupted turn."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gyre.program.routes import MovedTurn, Router, Turn
from gyre.types import FinishReason, Sample
from gyre.wire.messages import (
    AbortGenerate,
    Generate,
    Generated,
    Message,
    floats_to_bytes,
    ids_from_bytes,
    ids_to_bytes,
)

LENGTH = 12


def sampled(prompt: np.ndarray) -> int:
    """The next token is a function of the prefix alone, as with a deterministic engine."""
    return int(prompt.sum() * 31 + len(prompt)) % 997


class Engines:
    """Cells that sample one token at a time when told to."""

    def __init__(self) -> None:
        self.running: dict[tuple[int, str], tuple[Generate, list[int]]] = {}
        self.router: Router | None = None
        self.done: dict[str, Sample] = {}
        self.failed: dict[str, str] = {}
        self.idle: list[int] = []
        self.moved: list[MovedTurn] = []
        self.router = Router(
            send=self.send,
            on_done=lambda turn, sample: self.done.__setitem__(turn.call, sample),
            on_failed=lambda turn, error: self.failed.__setitem__(turn.call, error),
            on_idle=self.idle.append,
            on_moved=self.moved.append,
        )
        self.aborts: list[tuple[int, str]] = []

    def send(self, cell: int, message: Message) -> None:
        match message:
            case Generate():
                self.running[cell, message.call] = (message, [])
            case AbortGenerate():
                self.aborts.append((cell, message.call))

    def tick(self, cell: int, call: str) -> None:
        """One more token; the last one answers."""
        request, tokens = self.running[cell, call]
        prompt = np.concatenate([ids_from_bytes(request.prompt), np.array(tokens, np.int32)])
        tokens.append(sampled(prompt))
        if len(tokens) == request.max_new_tokens:
            self.answer(cell, call, "stop")

    def answer(self, cell: int, call: str, finish: str) -> None:
        request, tokens = self.running.pop((cell, call))
        self.router.receive(
            Generated(
                call=call,
                cell=cell,
                version=request.version,
                tokens=ids_to_bytes(np.array(tokens, np.int32)),
                logprobs=floats_to_bytes(np.full(len(tokens), -0.5, np.float32)),
                finish=finish,
            )
        )

    def serve_aborts(self) -> None:
        aborts, self.aborts = self.aborts, []
        for cell, call in aborts:
            if (cell, call) in self.running:
                self.answer(cell, call, "abort")


def make_turn(call: str, rollout: str, *, length: int = LENGTH) -> Turn:
    return Turn(
        call=call, rollout=rollout, prompt=np.arange(5, dtype=np.int32), max_new_tokens=length, temperature=1.0,
        top_p=1.0, seed=1, stop_tokens=(2,),
    )  # fmt: skip


def uninterrupted() -> list[int]:
    tokens: list[int] = []
    for _ in range(LENGTH):
        tokens.append(sampled(np.concatenate([np.arange(5), np.array(tokens, int)])))
    return tokens


@given(st.lists(st.tuples(st.sampled_from(["tick", "move", "close", "open", "abort"]), st.integers(0, 2)), max_size=60))
def test_turn_is_the_same_however_it_is_moved(actions: list[tuple[str, int]]) -> None:
    engines = Engines()
    router = engines.router
    versions = dict.fromkeys(range(3), 0)
    for cell in range(3):
        router.open_cell(cell, 0)
    router.admit("0.0", 0)
    router.submit(make_turn("c1", "0.0"))
    closed: set[int] = set()
    for action, cell in actions:
        match action:
            case "tick":
                for key in [key for key in engines.running if key[0] == cell]:
                    engines.tick(*key)
            case "move" if "c1" not in engines.done:
                router.move("0.0", cell)
            case "close" if cell not in closed:
                router.close_cell(cell)
                closed.add(cell)
            case "open" if cell in closed and not router.running(cell):
                versions[cell] += 1
                router.open_cell(cell, versions[cell])
                closed.discard(cell)
            case "abort":
                engines.serve_aborts()
        assert len(engines.running) <= 1, "a turn runs in two places"
    for _ in range(3):
        engines.serve_aborts()
    for cell in sorted(closed):
        router.open_cell(cell, versions[cell] + 1)
    while engines.running:
        engines.tick(*next(iter(engines.running)))
    sample = engines.done["c1"]
    assert sample.tokens.tolist() == uninterrupted()
    assert len(sample.logprobs) == LENGTH
    ends = [0, *(span.end for span in sample.spans)]
    assert [span.start for span in sample.spans] == ends[:-1] and ends[-1] == LENGTH
    assert sample.finish is FinishReason.STOP


def test_closed_cell_reports_idle_once_after_its_last_request() -> None:
    engines = Engines()
    engines.router.open_cell(0, 0)
    engines.router.open_cell(1, 0)
    for index in range(2):
        engines.router.admit(f"0.{index}", 0)
        engines.router.submit(make_turn(f"c{index}", f"0.{index}"))
        engines.router.move(f"0.{index}", 1)
    engines.router.close_cell(0)
    assert engines.idle == []
    engines.serve_aborts()
    assert engines.idle == [0]
    assert [moved.destination for moved in engines.moved] == [1, 1]


def test_empty_cell_is_idle_at_once() -> None:
    engines = Engines()
    engines.router.open_cell(0, 0)
    engines.router.close_cell(0)
    assert engines.idle == [0]


def test_failing_engine_is_asked_a_bounded_number_of_times() -> None:
    engines = Engines()
    engines.router.open_cell(0, 0)
    engines.router.admit("0.0", 0)
    engines.router.submit(make_turn("c", "0.0"))
    for _ in range(3):
        (cell, call) = next(iter(engines.running))
        engines.running.clear()
        engines.router.receive(Generated(call=call, cell=cell, version=0, error="broken"))
    assert engines.failed == {"c": "broken"} and not engines.running


def test_forgotten_rollout_is_never_answered() -> None:
    engines = Engines()
    engines.router.open_cell(0, 0)
    engines.router.admit("0.0", 0)
    engines.router.submit(make_turn("c", "0.0"))
    engines.router.forget("0.0")
    engines.router.close_cell(0)
    assert engines.idle == [], "its engine has not stopped yet"
    engines.serve_aborts()
    assert engines.idle == [0]
    assert engines.done == {} and engines.router.num_waiting == 0
