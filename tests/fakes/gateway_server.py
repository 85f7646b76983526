"""A gateway on a loopback port, with any function in place of the front."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gyre.gateway.app import Ask, build_app, serve_on
from gyre.wire.messages import ModelAnswer, ModelCall, ModelCallGone

WAIT_S = 10.0


def answer(call: ModelCall, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> ModelAnswer:
    """An answer to `call` with one chunk."""
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
