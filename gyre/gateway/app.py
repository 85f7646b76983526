"""The HTTP face of one rollout's gateway: holds the client's connection while the front finds the answer.

Knows no policy: a request goes out as a ModelCall and its ModelAnswer is written as it is. A
client that asked for a stream gets headers and pings while it waits, so that its own time limit to the
first byte never ends a long turn. A client that hangs up is reported. There is no limit on the whole wait:
the front answers every call, with an error if need be.
"""

import asyncio
import contextlib
import logging
import socket
import uuid
from collections.abc import Awaitable, Callable

import orjson
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gyre.gateway.dialect import STREAM_HEADERS, Dialect, RequestRefused
from gyre.gateway.dialects import bare_path, dialect_of
from gyre.types import RolloutId
from gyre.wire.messages import ModelAnswer, ModelCall, ModelCallGone

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 1.0
KEEP_ALIVE_S = 3600

Ask = Callable[[ModelCall], Awaitable[ModelAnswer]]
Gone = Callable[[ModelCallGone], None]
Closer = Callable[[], Awaitable[None]]


def build_app(rollout: RolloutId, ask: Ask, gone: Gone, ping_s: float, body_limit: int) -> ASGIApp:
    """An ASGI app that passes every HTTP request on through `ask`.

    `ping_s` is the silence, in seconds, after which a waiting stream gets a comment; `body_limit` is in bytes.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        body = await _body(request, body_limit)
        if body is None:
            return
        call = ModelCall(
            call=uuid.uuid4().hex,
            rollout=rollout,
            method=request.method,
            path=scope.get("path", "/"),
            headers=dict(request.headers),
            body=body,
        )
        if len(body) > body_limit:
            await _Writer(call, send).answer(_error(call, 413, f"The body is above {body_limit} bytes."))
            return
        await _serve(call, ask, gone, ping_s if _wants_stream(body) else None, receive, _Writer(call, send))

    return app


async def serve_on(sock: socket.socket, app: ASGIApp) -> Closer:
    """Serve `app` on a listening socket inside the running loop; the returned closer ends it and its connections.

    Many sockets can be served in one process: no signal handlers, no lifespan, no logging of its own.
    """
    config = uvicorn.Config(
        app,
        http=HttpToolsProtocol,
        lifespan="off",
        log_config=None,
        access_log=False,
        ws="none",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()

    def protocol() -> asyncio.Protocol:
        return HttpToolsProtocol(config=config, server_state=state, app_state={}, _loop=loop)

    server = await loop.create_server(protocol, sock=sock)

    async def close() -> None:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:  # each sees its client gone and ends by itself; the deadline is for one that does not
            _, late = await asyncio.wait(set(state.tasks), timeout=CLOSE_GRACE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    return close


class _Writer:
    """Writes one HTTP answer, perhaps after the headers of a stream and some pings."""

    def __init__(self, call: ModelCall, send: Send) -> None:
        self._has_body = call.method != "HEAD"
        self._dialect = _dialect(call)
        self._send = send
        self.is_open = False

    async def ping(self) -> None:
        """Open the stream if it is not, and write a ping."""
        if not self.is_open:
            await self._head(200, STREAM_HEADERS)
        await self._chunk(self._dialect.ping, more=True)

    async def answer(self, answer: ModelAnswer) -> None:
        """Write the answer and end. An error after the headers becomes an event of the stream."""
        chunks = answer.chunks
        if not self.is_open:
            headers = dict(answer.headers)
            if "text/event-stream" not in headers.get("content-type", ""):
                headers["content-length"] = str(sum(map(len, chunks)))
            await self._head(answer.status, headers)
        elif answer.status >= 400:
            chunks = [self._dialect.stream_error(b"".join(chunks))]
        if self._has_body:
            for chunk in chunks:
                await self._chunk(chunk, more=True)
        await self._chunk(b"", more=False)

    async def _head(self, status: int, headers: dict[str, str]) -> None:
        self.is_open = True
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _chunk(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def _serve(
    call: ModelCall, ask: Ask, gone: Gone, ping_s: float | None, receive: Receive, writer: _Writer
) -> None:
    """Wait for the answer or for the client to hang up, whichever is first; ping a stream meanwhile."""
    told_gone = ModelCallGone(call=call.call, rollout=call.rollout)
    try:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(_asked(call, ask))
            left = group.create_task(_disconnected(receive))
            while not asked.done() and not left.done():
                await asyncio.wait({asked, left}, timeout=ping_s, return_when=asyncio.FIRST_COMPLETED)
                if not asked.done() and not left.done():
                    await writer.ping()
            if asked.done():
                await writer.answer(asked.result())
            else:
                gone(told_gone)
            asked.cancel()
            left.cancel()
    except asyncio.CancelledError:
        gone(told_gone)
        raise


async def _asked(call: ModelCall, ask: Ask) -> ModelAnswer:
    """The answer; what goes wrong on the way to it is answered too. An outer shell: the client must be told."""
    try:
        return await ask(call)
    except Exception:
        log.exception("gateway_call=failed rollout=%s call=%s", call.rollout, call.call)
        return _error(call, 502, "The gateway could not reach the policy.")


def _dialect(call: ModelCall) -> Dialect:
    return dialect_of(bare_path(call.path), call.headers)


def _error(call: ModelCall, status: int, message: str) -> ModelAnswer:
    answer = _dialect(call).refusal(RequestRefused(status, message))
    return ModelAnswer(call=call.call, status=answer.status, headers=dict(answer.headers), chunks=list(answer.chunks))


async def _body(request: Request, limit: int) -> bytes | None:
    """The body, read no further than just above `limit`; None when the client left before its end."""
    body = bytearray()
    with contextlib.suppress(ClientDisconnect):
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                break
        return bytes(body)
    return None


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _wants_stream(body: bytes) -> bool:
    """Whether the body is a JSON object with a true "stream"."""
    if b'"stream"' not in body:
        return False
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(parsed, dict) and parsed.get("stream") is True
