"""Rules of the engine, on a real SGLang engine with a tiny model; one engine serves the module."""

import dataclasses
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from gyre.errors import EngineError
from gyre.fabric.weights import fingerprint_of
from gyre.serve.calls import Calls
from gyre.serve.engine import Engine
from gyre.serve.request import GenerateRequest
from gyre.types import FinishReason, Sample
from tests.fakes.settings import make_settings
from tests.fakes.tiny_model import TinyModel, build_tiny_model

PROMPT = np.arange(20, dtype=np.int32)


@dataclasses.dataclass
class Bench:
    """An engine that holds version 0 of the tiny model, and what it changed in this process by starting."""

    engine: Engine
    model: TinyModel
    weights: dict[str, torch.Tensor]
    changed: dict[str, tuple[object, object]]

    def run(self, *requests: GenerateRequest) -> dict[str, Sample | EngineError]:
        """Submit all at once, wait for all."""
        return Answers(self.engine, *requests).wait()

    def load(self, version: int) -> None:
        """(Re-)load the tiny model's weights."""
        self.engine.load_weights(self.weights.items(), version, soon())


class Answers:
    """Outcomes of calls by name."""

    def __init__(self, engine: Engine, *requests: GenerateRequest) -> None:
        self.outcomes: dict[str, Sample | EngineError] = {}
        self._expected, self._all = len(requests), threading.Event()
        for request in requests:
            engine.submit(request, self._done)

    def _done(self, call: str, outcome: Sample | EngineError) -> None:
        assert call not in self.outcomes
        self.outcomes[call] = outcome
        if len(self.outcomes) == self._expected:
            self._all.set()

    def wait(self) -> dict[str, Sample | EngineError]:
        assert self._all.wait(60), self.outcomes
        return self.outcomes


def soon() -> float:
    return time.monotonic() + 60


def ask(call: str, **changes: object) -> GenerateRequest:
    """A request with sane values and the given changes."""
    plain = GenerateRequest(
        call=call, prompt=PROMPT, max_new_tokens=24, temperature=1.0, top_p=1.0, seed=5, stop_tokens=(), version=0
    )
    return dataclasses.replace(plain, **changes)


def surroundings() -> dict[str, object]:
    """What an engine must leave as it was."""
    return {
        "environment": dict(os.environ),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "handlers": list(logging.getLogger().handlers),
        "level": logging.getLogger().level,
    }


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    engine = Engine(make_settings(model.path), rank=0)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    before = surroundings()
    engine.start(time.monotonic() + 240)
    after = surroundings()
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    weights = load_file(model.path / "model.safetensors")
    engine.load_weights(weights.items(), 0, soon())
    yield Bench(engine=engine, model=model, weights=weights, changed={k: (before[k], after[k]) for k in before})
    processes = engine.process_ids
    engine.shutdown(time.monotonic() + 20)
    assert not [pid for pid in processes if psutil.pid_exists(pid)]


def hf_logprobs(model: TinyModel, prompt: np.ndarray, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs of `tokens` after `prompt` by transformers, at a temperature."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32).eval()
    row = torch.from_numpy(np.concatenate([prompt, tokens])).long()[None]
    with torch.no_grad():
        logits = reference(row).logits[0, len(prompt) - 1 : -1].double()
    picked = torch.log_softmax(logits / temperature, dim=-1)
    return picked[torch.arange(len(tokens)), torch.from_numpy(tokens).long()].numpy()


def as_sample(outcome: Sample | EngineError) -> Sample:
    assert isinstance(outcome, Sample), outcome
    return outcome


def test_starting_leaves_the_process_as_it_was(bench: Bench) -> None:
    for name, (before, after) in bench.changed.items():
        assert before == after, name


def test_its_processes_hear_neither_interrupt_nor_termination(bench: Bench) -> None:
    for pid in bench.engine.process_ids:
        (line,) = [text for text in Path(f"/proc/{pid}/status").read_text().splitlines() if text.startswith("SigBlk")]
        blocked = int(line.split()[1], 16)
        assert blocked >> (signal.SIGINT - 1) & 1 and blocked >> (signal.SIGTERM - 1) & 1


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_log_probs_are_those_of_the_sampled_distribution(bench: Bench, temperature: float) -> None:
    sample = as_sample(bench.run(ask("t", temperature=temperature))["t"])
    assert len(sample.tokens) == 24 and sample.finish is FinishReason.LENGTH
    assert [(span.start, span.end, span.version) for span in sample.spans] == [(0, 24, 0)]
    expected = hf_logprobs(bench.model, PROMPT, sample.tokens, temperature)
    assert np.abs(sample.logprobs - expected).max() < 1e-4


def test_zero_temperature_takes_the_most_likely_with_the_policys_log_probs(bench: Bench) -> None:
    sample = as_sample(bench.run(ask("g", temperature=0.0, top_p=0.5))["g"])
    again = as_sample(bench.run(ask("h", temperature=0.0, seed=9))["h"])
    assert sample.tokens.tolist() == again.tokens.tolist()
    assert np.abs(sample.logprobs - hf_logprobs(bench.model, PROMPT, sample.tokens, 1.0)).max() < 1e-4


def test_a_draw_does_not_depend_on_what_else_is_in_the_batch(bench: Bench) -> None:
    names = [f"r{index}" for index in range(6)]
    alone = [as_sample(bench.run(ask(name, seed=index))[name]) for index, name in enumerate(names)]
    others = [ask("greedy", temperature=0.0), ask("warm", temperature=1.4, prompt=PROMPT[::-1].copy())]
    mixed = bench.run(*others, *(ask(name, seed=index) for index, name in enumerate(names)))
    for name, sample in zip(names, alone, strict=True):
        assert as_sample(mixed[name]).tokens.tolist() == sample.tokens.tolist()
    assert len({tuple(sample.tokens) for sample in alone}) == len(names)


def test_a_cut_turn_continues_as_if_it_had_not_been_cut(bench: Bench) -> None:
    whole = as_sample(bench.run(ask("whole", max_new_tokens=1200))["whole"])
    answers = Answers(bench.engine, ask("cut", max_new_tokens=1200))
    time.sleep(0.3)  # Not for synchronisation: any cut point must do.
    bench.engine.abort("cut")
    part = as_sample(answers.wait()["cut"])
    assert part.finish is FinishReason.ABORT and 0 < len(part.tokens) < 1200, len(part.tokens)
    prompt = np.concatenate([PROMPT, part.tokens])
    rest = as_sample(bench.run(ask("rest", prompt=prompt, max_new_tokens=1200 - len(part.tokens)))["rest"])
    assert [*part.tokens, *rest.tokens] == whole.tokens.tolist()
    assert np.abs(np.concatenate([part.logprobs, rest.logprobs]) - whole.logprobs).max() < 1e-4
    assert rest.cached_tokens > len(PROMPT)


def test_aborting_at_once_answers_every_call_and_unknown_calls_are_no_error(bench: Bench) -> None:
    requests = [ask(f"q{index}", max_new_tokens=1500, seed=index) for index in range(24)]
    answers = Answers(bench.engine, *requests)
    bench.engine.abort("nobody")
    for request in requests:
        bench.engine.abort(request.call)
    outcomes = answers.wait()
    for request in requests:
        sample = as_sample(outcomes[request.call])
        assert sample.finish is FinishReason.ABORT and len(sample.tokens) < 1500
    assert any(len(as_sample(outcome).tokens) == 0 for outcome in outcomes.values())
    assert bench.engine.in_flight == 0


def test_a_stop_token_ends_the_turn_and_is_part_of_it(bench: Bench) -> None:
    free = as_sample(bench.run(ask("free"))["free"])
    stop = int(free.tokens[10])
    first = free.tokens.tolist().index(stop)
    sample = as_sample(bench.run(ask("stopped", stop_tokens=(stop,)))["stopped"])
    assert sample.finish is FinishReason.STOP and sample.tokens.tolist() == free.tokens[: first + 1].tolist()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"top_p": 0.9}, "top_p is 0.9"),
        ({"version": 7}, "wants version 7, engine holds 0"),
        ({"prompt": np.empty(0, dtype=np.int32)}, "prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"prompt": np.zeros(5000, dtype=np.int32)}, "longer than the model's context"),
    ],
)
def test_unsound_requests_are_refused_by_name(bench: Bench, changes: dict[str, object], text: str) -> None:
    outcome = bench.run(ask("bad", **changes))["bad"]
    assert isinstance(outcome, EngineError) and text in str(outcome)


def test_new_weights_change_the_answers_and_the_old_prefixes_are_gone(bench: Bench) -> None:
    before = as_sample(bench.run(ask("before"))["before"])
    shifted = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in bench.weights.items()}
    bench.engine.load_weights(shifted.items(), 1, soon())
    assert bench.engine.version == 1 and bench.engine.fingerprint == fingerprint_of(shifted.items())
    bench.engine.probe(soon())
    other = as_sample(bench.run(ask("after", version=1))["after"])
    assert other.tokens.tolist() != before.tokens.tolist() and other.spans[0].version == 1
    assert other.cached_tokens <= 1
    bench.load(0)
    back = as_sample(bench.run(ask("back"))["back"])
    assert back.tokens.tolist() == before.tokens.tolist()


def test_a_failed_load_leaves_the_engine_without_a_version(bench: Bench) -> None:
    few = list(bench.weights.items())[1:]
    with pytest.raises(EngineError, match="missing"):
        bench.engine.load_weights(few, 2, soon())
    assert bench.engine.version is None and bench.engine.fingerprint is None
    with pytest.raises(EngineError, match="no version"):
        bench.engine.probe(soon())
    cropped = [(name, tensor[:3]) for name, tensor in bench.weights.items()]
    with pytest.raises(EngineError, match="has shape"):
        bench.engine.load_weights(cropped, 2, soon())
    bench.load(0)
    bench.engine.probe(soon())


def test_weights_and_memory_change_only_while_nothing_is_in_flight(bench: Bench) -> None:
    answers = Answers(bench.engine, ask("busy", max_new_tokens=1800))
    while not bench.engine.in_flight:
        time.sleep(0.001)
    for act in (
        lambda: bench.engine.release(soon()),
        lambda: bench.engine.flush(soon()),
        lambda: bench.load(1),
    ):
        with pytest.raises(EngineError, match="in flight"):
            act()
    bench.engine.abort("busy")
    answers.wait()


def test_release_and_resume_can_be_repeated_and_a_released_engine_takes_no_calls(bench: Bench) -> None:
    before = as_sample(bench.run(ask("before"))["before"])
    assert bench.engine.release(soon()) == 0
    assert bench.engine.release(soon()) == 0
    assert bench.engine.version is None
    assert isinstance(bench.run(ask("released"))["released"], EngineError)
    with pytest.raises(EngineError, match="released"):
        bench.load(0)
    bench.engine.resume(soon())
    bench.engine.resume(soon())
    bench.load(0)
    bench.engine.probe(soon())
    assert as_sample(bench.run(ask("after"))["after"]).tokens.tolist() == before.tokens.tolist()


OTHER_RANK = """
import sys, threading, time
from pathlib import Path
import numpy as np
from safetensors.torch import load_file
from gyre.serve.engine import Engine, GenerateRequest
from tests.fakes.settings import make_settings

if __name__ == "__main__":
    path = Path(sys.argv[1])
    engine = Engine(make_settings(path), rank=1)
    engine.start(time.monotonic() + 240)
    engine.load_weights(load_file(path / "model.safetensors").items(), 0, time.monotonic() + 60)
    request = GenerateRequest(call="t", prompt=np.arange(20, dtype=np.int32), max_new_tokens=24, temperature=1.0,
                              top_p=1.0, seed=5, stop_tokens=(), version=0)
    done = threading.Event()
    def answer(call, outcome):
        print(*outcome.tokens, flush=True)
        done.set()
    engine.submit(request, answer)
    done.wait(60)
    print(*engine.process_ids, flush=True)
    engine.submit(type(request)(**{name: getattr(request, name) for name in request.__slots__}
                                | {"call": "u", "max_new_tokens": 1900}), answer)
    sys.stdin.read()
"""


def test_another_process_draws_the_same_and_its_engine_dies_with_it(bench: Bench, tmp_path: Path) -> None:
    own = as_sample(bench.run(ask("own"))["own"])
    script = tmp_path / "rank.py"
    script.write_text(OTHER_RANK)
    with subprocess.Popen(
        [sys.executable, str(script), str(bench.model.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as rank:  # fmt: skip
        assert rank.stdout is not None
        assert [int(token) for token in rank.stdout.readline().split()] == own.tokens.tolist()
        processes = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        assert len(processes) == 2
        rank.kill()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_a_stopped_engine_answers_what_is_in_flight_and_what_comes_later(bench: Bench) -> None:
    """Runs on calls alone: the fixture's engine must live on."""
    calls, outcomes = Calls(bench.engine._sglang, timeout_s=60), {}
    ended = threading.Event()

    def begin_and_fail() -> None:
        calls.begin(ask("early"), outcomes.__setitem__)
        calls.fail(EngineError("over"))
        calls.begin(ask("late"), outcomes.__setitem__)
        assert bench.engine._loop is not None
        bench.engine._loop.call_later(0.1, ended.set)

    assert bench.engine._loop is not None
    bench.engine._loop.call_soon_threadsafe(begin_and_fail)
    assert ended.wait(10)
    assert {name: str(outcome) for name, outcome in outcomes.items()} == {"early": "over", "late": "over"}
    assert len(calls) == 0


def test_a_dead_engine_process_fails_its_calls_and_leaves_other_children_alone(bench: Bench, tmp_path: Path) -> None:
    # Last in the module: the engine does not come back.
    with subprocess.Popen(["sleep", "600"]) as other:
        answers = Answers(bench.engine, ask("doomed", max_new_tokens=1800))
        while not bench.engine.in_flight:
            time.sleep(0.001)
        os.kill(bench.engine.process_ids[0], signal.SIGKILL)
        outcome = answers.wait()["doomed"]
        assert isinstance(outcome, EngineError) and "died" in str(outcome)
        with pytest.raises(EngineError, match="died"):
            bench.engine.probe(soon())
        assert isinstance(bench.run(ask("late"))["late"], EngineError)
        bench.engine.shutdown(time.monotonic() + 20)
        assert other.poll() is None
        other.kill()
