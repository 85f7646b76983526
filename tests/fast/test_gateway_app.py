"""The socket passes calls on, pings a waiting stream, reports who hangs up, and closes in time."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import orjson
import pytest
from openai.types.chat import ChatCompletion

from gyre.gateway.app import Ask, build_app, serve_on
from gyre.gateway.render import load_renderer
from gyre.gateway.session import Answered, Session, SessionSettings
from gyre.wire.messages import ModelAnswer, ModelCall, ModelCallGone
from tests.fakes.chat_model import write_chat_model
from tests.fakes.gateway_client import API_KEY, sampled

WAIT_S = 10.0
END = 2
STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def answer(call: ModelCall, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> ModelAnswer:
    return ModelAnswer(
        call=call.call, status=status, headers=headers or {"content-type": "application/json"}, chunks=[body]
    )


@asynccontextmanager
async def served(ask: Ask, gone: list[ModelCallGone], ping_s: float = 10.0) -> AsyncIterator[str]:
    """The base URL of a gateway on a loopback port."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        close = await serve_on(sock, build_app("0.0", ask, gone.append, ping_s, 2000))
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            await asyncio.wait_for(close(), WAIT_S)


def test_a_request_is_passed_on_whole_and_its_answer_comes_back() -> None:
    async def main() -> None:
        seen: list[ModelCall] = []

        async def ask(call: ModelCall) -> ModelAnswer:
            seen.append(call)
            return answer(call, b'{"ok":1}', status=418)

        async with served(ask, []) as url, httpx.AsyncClient() as client:
            got = await client.post(url + "/v1/chat/completions", content=b"\x00body", headers={"authorization": "k"})
            head = await client.head(url + "/api/hello")
            large = await client.post(url + "/x", content=b"x" * 2001)
        assert (got.status_code, got.content) == (418, b'{"ok":1}')
        assert (seen[0].rollout, seen[0].method, seen[0].path) == ("0.0", "POST", "/v1/chat/completions")
        assert seen[0].body == b"\x00body" and seen[0].headers["authorization"] == "k"
        assert (head.status_code, head.content) == (418, b"")
        assert large.status_code == 413 and large.json()["error"]["type"] == "invalid_request_error"
        assert len(seen) == 2 and seen[0].call != seen[1].call

    asyncio.run(main())


def test_a_waiting_stream_is_pinged_until_its_chunks_come() -> None:
    async def main() -> None:
        pinged = asyncio.Event()

        async def ask(call: ModelCall) -> ModelAnswer:
            await asyncio.wait_for(pinged.wait(), WAIT_S)
            return answer(call, b"data: [DONE]\n\n", headers=STREAM)

        async with served(ask, [], ping_s=0.01) as url, httpx.AsyncClient() as client:
            async with client.stream("POST", url + "/chat/completions", json={"stream": True}) as response:
                assert response.status_code == 200
                lines = []
                async for line in response.aiter_lines():
                    lines.append(line)
                    pinged.set()
        assert lines[0] == ": ping" and "data: [DONE]" in lines

    asyncio.run(main())


def test_an_error_after_the_headers_is_an_event_that_the_vendors_client_raises() -> None:
    async def main() -> None:
        opened = asyncio.Event()

        async def ask(call: ModelCall) -> ModelAnswer:
            await asyncio.wait_for(opened.wait(), WAIT_S)
            return answer(call, orjson.dumps({"error": {"message": "no cell", "type": "server_error"}}), status=503)

        async with served(ask, [], ping_s=0.01) as url:
            async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as client:
                stream = await client.chat.completions.create(model="m", messages=[], stream=True)
                opened.set()
                try:
                    async for _ in stream:
                        raise AssertionError("a chunk came")
                except openai.APIError as error:
                    assert "no cell" in str(error)
                else:
                    raise AssertionError("the error was swallowed")

    asyncio.run(main())


def test_a_client_that_hangs_up_is_reported_and_its_call_is_cancelled() -> None:
    async def main() -> None:
        asked, cancelled = asyncio.Event(), asyncio.Event()
        gone: list[ModelCallGone] = []
        calls: list[str] = []

        async def ask(call: ModelCall) -> ModelAnswer:
            calls.append(call.call)
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError("unreachable")

        async with served(ask, gone) as url:
            async with httpx.AsyncClient() as client:
                request = asyncio.create_task(client.post(url + "/chat/completions", content=b"{}"))
                await asyncio.wait_for(asked.wait(), WAIT_S)
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
            await asyncio.wait_for(cancelled.wait(), WAIT_S)
        assert [message.call for message in gone] == calls

    asyncio.run(main())


def test_a_call_that_cannot_be_asked_is_502_and_a_closed_socket_frees_its_clients() -> None:
    async def main() -> None:
        asked = asyncio.Event()
        gone: list[ModelCallGone] = []

        async def ask(call: ModelCall) -> ModelAnswer:
            if call.method == "GET":
                raise RuntimeError("link is down")
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

        async with httpx.AsyncClient() as client:
            async with served(ask, gone) as url:
                assert (await client.get(url + "/models")).status_code == 502
                waiting = asyncio.create_task(client.post(url + "/chat/completions", content=b"{}"))
                await asyncio.wait_for(asked.wait(), WAIT_S)
            (result,) = await asyncio.wait_for(asyncio.gather(waiting, return_exceptions=True), WAIT_S)
        assert isinstance(result, httpx.HTTPError)
        assert len(gone) == 1

    asyncio.run(main())


def test_the_vendors_client_talks_to_a_session_through_the_socket(tmp_path: Path) -> None:
    session = Session(
        "0.0",
        load_renderer(write_chat_model(tmp_path)),
        SessionSettings(
            temperature=1.0,
            top_p=1.0,
            max_turn_tokens=32,
            max_context_tokens=200,
            model_name="policy",
            api_key=API_KEY,
        ),
    )

    async def ask(call: ModelCall) -> ModelAnswer:
        opened = session.open(call)
        if isinstance(opened, Answered):
            return opened.answer
        return session.close(call.call, sampled([70, 71, END]))[0]

    async def main() -> None:
        async with (
            served(ask, []) as url,
            openai.AsyncOpenAI(base_url=url + "/v1", api_key=API_KEY, max_retries=0) as client,
        ):
            messages: list[dict[str, str]] = [{"role": "user", "content": "first"}]
            whole = await client.chat.completions.create(model="m", messages=messages)
            ChatCompletion.model_validate(whole.model_dump())
            said = whole.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "next"}]
            stream = await client.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
            assert [model.id for model in (await client.models.list()).data] == ["policy"]
            too_long = [{"role": "user", "content": "x" * 900}]
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="m", messages=too_long)
            assert refused.value.code == "context_length_exceeded"
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="other").models.list()

    asyncio.run(main())
    assert session.stats.turns == 2 and session.turns[1].parent == session.turns[0].sampled
