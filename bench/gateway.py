"""The gateway: CPU time of a turn, added latency, memory of a captured token.

Rows, one per measurement. `turn_ms`: CPU milliseconds of `Session.open` plus `close` for one request with
`history_tokens` before it and about `new_tokens` new ones; `parse_ms`: orjson over the same body;
`rerender_ms`: rendering and tokenising the whole conversation. The latency rows run live sessions of about 4K
tokens on one HTTP gateway with an engine stand-in that waits a known time; `p50_ms`, `p99_ms` are what the
session adds in wall time (opening and closing the turn; not the HTTP server's reading and writing), `driven_s` is how
long. Bytes per token are of the session after its longest history, the request's own body not counted.

    python -m bench gateway [--quick]
"""

import argparse
import asyncio
import gc
import heapq
import json
import random
import socket
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from gyre.gateway.app import build_app, serve_on
from gyre.gateway.render import Renderer, load_renderer
from gyre.gateway.session import Answered, Sampling, Session, SessionSettings
from gyre.types import FinishReason, Sample, VersionSpan
from gyre.wire.messages import ModelAnswer, ModelCall
from tests.fakes.chat_model import write_chat_model

KEY = "key"
HISTORIES = (1_000, 32_000, 128_000, 700_000)
WORDS = ("the", "output", "of", "command", "is", "user", "turn", "file", "next", "more", "hello", "first")
TURN_TOKENS, RESULT_TOKENS = 300, 700
ENGINE_S = 0.05
TURN_EVERY_S = 10.0


class Talk:
    """A growing conversation of one session, as a client holds it."""

    def __init__(self, renderer: Renderer, rollout: str, tokens_per_word: float) -> None:
        settings = SessionSettings(
            temperature=1.0,
            top_p=1.0,
            max_turn_tokens=1 << 20,
            max_context_tokens=1 << 21,
            model_name="bench",
            api_key=KEY,
        )
        self.session = Session(rollout, renderer, settings)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "You are s."}]
        self._rollout, self._per_word = rollout, tokens_per_word
        self._random, self._number = random.Random(len(rollout)), 0
        self._end = renderer.template.end_of_turn

    def text(self, tokens: int) -> str:
        """About so many tokens."""
        return " ".join(self._random.choices(WORDS, k=max(1, int(tokens / self._per_word))))

    def ask(self, tokens: int) -> ModelCall:
        """The next request: one more user message."""
        self.messages.append({"role": "user", "content": self.text(tokens)})
        self._number += 1
        return ModelCall(
            call=f"{self._rollout}-{self._number}",
            rollout=self._rollout,
            method="POST",
            path="/v1/chat/completions",
            headers={"authorization": f"Bearer {KEY}"},
            body=orjson.dumps({"model": "bench", "messages": self.messages}),
        )

    def hear(self, answer: ModelAnswer) -> None:
        """Keep the reply in the history."""
        assert answer.status == 200, answer
        self.messages.append(orjson.loads(answer.chunks[0])["choices"][0]["message"])

    def turn(self, new_tokens: int, sample: Sample) -> tuple[float, bytes]:
        """One turn; (CPU seconds of the session, body)."""
        call = self.ask(new_tokens)
        began = time.process_time()
        opened = self.session.open(call)
        assert isinstance(opened, Sampling), opened
        (answer,) = self.session.close(opened.call, sample)
        took = time.process_time() - began
        self.hear(answer)
        return took, call.body

    def tokens(self) -> int:
        """Tokens of the conversation."""
        return self.session.tree.num_tokens


def sample_of(renderer: Renderer, text: str) -> Sample:
    """What an engine would return for `text`."""
    template = renderer.template
    tokens = np.append(template.encode(text), template.end_of_turn).astype(np.int32)
    logprobs = np.full(len(tokens), -0.5, dtype=np.float32)
    spans = (VersionSpan(start=0, end=len(tokens), version=1),)
    return Sample(tokens=tokens, logprobs=logprobs, spans=spans, finish=FinishReason.STOP)


def cpu_s(work: Callable[[], object], repeats: int) -> float:
    """The median CPU time of one call."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times)


def turn_row(renderer: Renderer, per_word: float, history: int, repeats: int) -> dict[str, Any]:
    """Cost of turns at one length of history, against parsing the body and rendering everything again."""
    talk = Talk(renderer, f"turn-{history}", per_word)
    sample = sample_of(renderer, talk.text(TURN_TOKENS))
    chunk = max(RESULT_TOKENS, history // 64)
    while talk.tokens() < history - chunk:
        talk.turn(min(chunk, history - talk.tokens()), sample)
    gc.collect()
    turns = [talk.turn(RESULT_TOKENS, sample) for _ in range(repeats)]
    body = turns[-1][1]
    parse_s = cpu_s(lambda: orjson.loads(body), max(repeats, 20))
    rendered = [dict(one, tool_calls=[]) for one in talk.messages]

    def rerender() -> None:
        renderer.template.encode(renderer.template.text(rendered))

    rerender_s = cpu_s(rerender, 3)
    turn_s = statistics.median(took for took, _ in turns)
    return {
        "kind": "turn",
        "history_tokens": talk.tokens(),
        "new_tokens": RESULT_TOKENS + TURN_TOKENS,
        "body_bytes": len(body),
        "turn_ms": round(turn_s * 1e3, 3),
        "parse_ms": round(parse_s * 1e3, 3),
        "rerender_ms": round(rerender_s * 1e3, 3),
        "turn_vs_parse": round(turn_s / parse_s, 2),
        "rerender_vs_turn": round(rerender_s / turn_s, 1),
    }


def memory_row(renderer: Renderer, per_word: float, history: int) -> dict[str, Any]:
    """Bytes that a session keeps per token of its tree."""
    sample = sample_of(renderer, "next turn " * TURN_TOKENS)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    talk = Talk(renderer, f"memory-{history}", per_word)
    while talk.tokens() < history:
        talk.turn(max(RESULT_TOKENS, history // 64), sample)
    tokens = talk.tokens()
    talk.messages.clear()
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    sampled = talk.session.tree.num_sampled
    return {"kind": "memory", "tokens": tokens, "sampled": sampled, "bytes_per_token": round(kept / tokens, 2)}


class Stand:
    """One HTTP gateway with many sessions behind it; the rollout of a call is told by its model's name."""

    def __init__(self, talks: dict[str, Talk], sample: Sample) -> None:
        self._talks, self._sample = talks, sample
        self.added: list[float] = []

    async def ask(self, call: ModelCall) -> ModelAnswer:
        """The front and its engine, in this process: the engine only waits."""
        began = time.perf_counter()
        session = self._talks[call.headers["x-rollout"]].session
        opened = session.open(call)
        if isinstance(opened, Answered):
            return opened.answer
        opened_at = time.perf_counter()
        await asyncio.sleep(ENGINE_S)
        woken = time.perf_counter()
        (answer,) = session.close(call.call, self._sample)
        self.added.append((opened_at - began) + (time.perf_counter() - woken))
        return answer


async def post(port: int, rollout: str, body: bytes) -> bytes:
    """One request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: b\r\nauthorization: Bearer {KEY}\r\nx-rollout: {rollout}\r\n"
        f"connection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    data = await reader.read()
    writer.close()
    return data


async def drive(renderer: Renderer, per_word: float, sessions: int, history: int, seconds: float) -> dict[str, Any]:
    """Each session takes a turn every TURN_EVERY_S, evenly spread; what the gateway adds to each."""
    sample = sample_of(renderer, "next turn " * 50)
    talks = {f"s{number}": Talk(renderer, f"s{number}", per_word) for number in range(sessions)}
    for talk in talks.values():
        talk.turn(history, sample)
    stand = Stand(talks, sample)
    stamps: list[float] = []

    async def stamped(call: ModelCall) -> ModelAnswer:
        began = time.perf_counter()
        answer = await stand.ask(call)
        stamps.append(time.perf_counter() - began)
        return answer

    sock = socket.create_server(("127.0.0.1", 0))
    close = await serve_on(sock, build_app("bench", stamped, lambda _: None, 10.0, 64 << 20))
    port = sock.getsockname()[1]
    began, tasks = time.perf_counter(), []
    due = [(number * TURN_EVERY_S / sessions, f"s{number}") for number in range(sessions)]
    heapq.heapify(due)

    async def one(rollout: str) -> None:
        talk = talks[rollout]
        data = await post(port, rollout, talk.ask(RESULT_TOKENS // 4).body)
        head, _, body = data.partition(b"\r\n\r\n")
        assert b" 200 " in head[:20], data[:300]
        talk.messages.append(orjson.loads(body)["choices"][0]["message"])

    while due and due[0][0] < seconds:
        at, rollout = heapq.heappop(due)
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(rollout)))
        heapq.heappush(due, (at + TURN_EVERY_S, rollout))
    await asyncio.gather(*tasks)
    await close()
    sock.close()
    added = sorted(stand.added)
    waits = sorted(stamps)
    return {
        "kind": "latency",
        "sessions": sessions,
        "turns": len(added),
        "driven_s": round(seconds, 1),
        "p50_ms": round(1e3 * added[len(added) // 2], 3),
        "p99_ms": round(1e3 * added[min(len(added) - 1, int(0.99 * len(added)))], 3),
        "p99_with_wake_up_ms": round(1e3 * (waits[min(len(waits) - 1, int(0.99 * len(waits)))] - ENGINE_S), 3),
    }


def main() -> dict[str, Any]:
    """Everything; a few CPU-minutes, seconds with --quick."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="shorter histories and drives")
    quick = parser.parse_args().quick
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        renderer = load_renderer(write_chat_model(Path(folder)))
        probe = " ".join(random.Random(1).choices(WORDS, k=2000))
        per_word = len(renderer.template.encode(probe)) / 2000
        lengths = HISTORIES[: 2 if quick else None]
        rows += [turn_row(renderer, per_word, history, 5 if quick else 15) for history in lengths]
        rows.append(memory_row(renderer, per_word, 32_000 if quick else 128_000))
        for sessions in (1, 200, 1000):
            seconds = (3.0 if quick else 20.0) if sessions > 1 else (11.0 if quick else 60.0)
            rows.append(asyncio.run(drive(renderer, per_word, sessions, 4000, seconds)))
    longest = [row for row in rows if row["kind"] == "turn"][-1]
    latency = {row["sessions"]: row for row in rows if row["kind"] == "latency"}
    return {
        "turn_vs_parse_700k": longest["turn_vs_parse"],
        "rerender_vs_turn_700k": longest["rerender_vs_turn"],
        "p50_ms_200": latency[200]["p50_ms"],
        "p99_ms_200": latency[200]["p99_ms"],
        "p99_ms_1000": latency[1000]["p99_ms"],
        "bytes_per_token": next(row["bytes_per_token"] for row in rows if row["kind"] == "memory"),
        "rows": rows,
    }


if __name__ == "__main__":
    print(json.dumps(main()))
