"""OpenAI's own client against the gateway: it accepts every answer and raises the right errors."""

import asyncio
from pathlib import Path

import openai
import orjson
import pytest
from openai.types.chat import ChatCompletion

from gyre.gateway.render import load_renderer
from gyre.gateway.session import Answered, Session, SessionSettings
from gyre.wire.messages import ModelAnswer, ModelCall
from tests.fakes.chat_model import write_chat_model
from tests.fakes.gateway_client import API_KEY, sampled
from tests.fakes.gateway_server import WAIT_S, answer, served

END = 2


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
                with pytest.raises(openai.APIError, match="no cell"):
                    await anext(aiter(stream))

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
