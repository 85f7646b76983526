"""The socket passes calls on, pings a waiting stream, reports who hangs up, and closes in time."""

import asyncio

import httpx

from gyre.wire.messages import ModelAnswer, ModelCall, ModelCallGone
from tests.fakes.gateway_server import WAIT_S, answer, served

STREAM = {"content-type": "text/event-stream; charset=utf-8"}


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


def test_an_error_after_the_headers_is_an_event_of_the_stream() -> None:
    async def main() -> None:
        opened = asyncio.Event()

        async def ask(call: ModelCall) -> ModelAnswer:
            await asyncio.wait_for(opened.wait(), WAIT_S)
            return answer(call, b'{"error":{"message":"no cell"}}', status=503)

        async with (
            served(ask, [], ping_s=0.01) as url,
            httpx.AsyncClient() as client,
            client.stream("POST", url + "/chat/completions", json={"stream": True}) as response,
        ):
            opened.set()
            lines = [line async for line in response.aiter_lines()]
        assert response.status_code == 200 and lines[0] == ": ping"
        assert 'data: {"error":{"message":"no cell"}}' in lines

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
