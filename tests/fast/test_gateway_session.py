"""A session keeps ids exact, matches by what it told, de-duplicates retries, and survives every client."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.gateway.render import Renderer, load_renderer
from gyre.gateway.session import MAX_REPLAYS, Answered, Sampling, Session, SessionSettings, Waiting, bare_path
from gyre.tree.tree import Tree
from gyre.types import FinishReason
from tests.fakes.chat_model import CHATML, write_chat_model
from tests.fakes.gateway_client import API_KEY, chat_call, content_of, raw_call, sampled, take_turn

USER = {"role": "user", "content": "first"}
END = 2
DATA = Path(__file__).parents[1] / "data" / "harness"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return load_renderer(write_chat_model(tmp_path_factory.mktemp("chat_model")))


def session_with(renderer: Renderer, max_context_tokens: int = 4096) -> Session:
    rules = SessionSettings(
        temperature=1.0,
        top_p=0.9,
        max_turn_tokens=64,
        max_context_tokens=max_context_tokens,
        model_name="policy",
        api_key=API_KEY,
    )
    return Session("0.0", renderer, rules)


def error_of(opened: object) -> tuple[int, dict[str, Any]]:
    assert isinstance(opened, Answered), opened
    return opened.answer.status, orjson.loads(opened.answer.chunks[0])["error"]


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_next_prompt_is_the_exact_ids_so_far_and_the_suffix(renderer: Renderer, data: st.DataObject) -> None:
    """The policy may sample anything: control tokens, halves of characters, NUL bytes, nothing at all."""
    session = session_with(renderer)
    messages: list[dict[str, Any]] = [USER]
    known: list[int] = []
    for _ in range(3):
        tokens = data.draw(st.lists(st.integers(0, 266), max_size=6))
        is_cut = data.draw(st.booleans())
        finish = FinishReason.LENGTH if is_cut else FinishReason.STOP
        tokens = tokens if is_cut else [*tokens, END]
        opened, said = take_turn(session, messages, sampled(tokens, finish))
        prompt = opened.prompt.tolist()
        assert prompt[: len(known)] == known
        assert not known or known[-1] == END or prompt[len(known)] == END
        known = prompt + tokens
        messages = json.loads(json.dumps([*messages, assistant(said), {"role": "user", "content": "next"}]))
    assert session.tree.path(session.turns[-1].sampled).tolist() == known
    assert (session.stats.retokenised_tokens, session.stats.forks, session.tree.num_leaves) == (0, 0, 1)
    assert session.stats.turns == 3


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_the_recorded_turns_rebuild_the_same_tree(renderer: Renderer, data: st.DataObject) -> None:
    session, samples = session_with(renderer), []
    histories: list[list[dict[str, Any]]] = [[USER]]
    for number in range(5):
        history = data.draw(st.sampled_from(histories))
        sample = sampled([70 + data.draw(st.integers(0, 1)), END], version=number)
        _, said = take_turn(session, history, sample, user=str(number))
        samples.append(sample)
        histories.append([*history, assistant(said), {"role": "user", "content": data.draw(st.sampled_from("ab"))}])
    rebuilt = Tree()
    for turn, sample in zip(session.turns, samples, strict=True):
        assert rebuilt.add_context(turn.parent, turn.context) == turn.context_node
        assert rebuilt.add_sampled(turn.context_node, sample) == turn.sampled
    assert [node.tokens.tolist() for node in rebuilt.nodes()] == [node.tokens.tolist() for node in session.tree.nodes()]
    assert session.stats.retokenised_tokens == 0


def test_a_turn_that_vanishes_from_the_history_stays_as_a_leaf(renderer: Renderer) -> None:
    session = session_with(renderer)
    _, said = take_turn(session, [USER], sampled([70, END]))
    take_turn(session, [USER, assistant(said), USER], sampled([71, END]))
    take_turn(session, [USER, assistant(said), USER, USER], sampled([72, END]))
    assert session.stats.forks == 1 and session.tree.num_leaves == 2
    assert session.turns[1].parent == session.turns[2].parent == session.turns[0].sampled
    assert not session.tree.children(session.turns[1].sampled)


def test_an_assistant_message_that_nobody_sampled_is_context(renderer: Renderer) -> None:
    session = session_with(renderer)
    take_turn(session, [USER, assistant("invented"), USER], sampled([70, END]))
    assert session.tree.num_sampled == 2
    assert "invented" in renderer.template.decode(session.turns[0].context)


def test_two_samples_of_one_prompt_are_two_nodes_under_one_context(renderer: Renderer) -> None:
    session = session_with(renderer)
    take_turn(session, [USER], sampled([70, END]))
    take_turn(session, [USER], sampled([70, END]), user="another body")
    first, second = session.turns
    assert first.context_node == second.context_node and first.sampled != second.sampled


def test_volatile_fields_do_not_break_the_match(renderer: Renderer) -> None:
    session = session_with(renderer)
    _, said = take_turn(session, [USER], sampled([70, END]))
    parts = [{"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}]
    rewritten = [{**USER, "id": "m1"}, {"role": "assistant", "content": parts, "refusal": None, "tool_calls": None}]
    take_turn(session, [*rewritten, USER], sampled([71, END]))
    assert session.turns[1].parent == session.turns[0].sampled


def test_a_reply_that_comes_back_trimmed_still_matches(renderer: Renderer) -> None:
    session = session_with(renderer)
    blank = int(renderer.template.encode(" ")[0])
    _, said = take_turn(session, [USER], sampled([blank, 70, blank, END]))
    assert said != said.strip()
    take_turn(session, [USER, assistant(said.strip()), USER], sampled([71, END]))
    assert session.turns[1].parent == session.turns[0].sampled


def test_other_tools_are_another_conversation(renderer: Renderer) -> None:
    session = session_with(renderer)
    _, said = take_turn(session, [USER], sampled([70, END]))
    tool = {"type": "function", "function": {"name": "bash"}}
    take_turn(session, [USER, assistant(said), USER], sampled([71, END]), tools=[tool])
    assert session.turns[1].parent is None and session.stats.forks == 1


def test_full_rendering_counts_sampled_tokens_that_it_does_not_repeat(tmp_path: Path) -> None:
    echoing = CHATML + "{{- messages | tojson | length }}"
    session = session_with(load_renderer(write_chat_model(tmp_path, echoing)))
    _, said = take_turn(session, [USER], sampled([70, 71, END]))
    take_turn(session, [USER, assistant(said), USER], sampled([72, END]))
    assert session.stats.retokenised_tokens == 3


def test_the_run_rules_sampling_and_a_smaller_bound_is_honoured(renderer: Renderer) -> None:
    session = session_with(renderer)
    opened = session.open(chat_call([USER], temperature=0.1, top_p=0.2, max_tokens=5, max_completion_tokens=900))
    assert isinstance(opened, Sampling)
    assert (opened.temperature, opened.top_p, opened.max_new_tokens) == (1.0, 0.9, 5)
    assert opened.stop_tokens == (END,) and opened.turn == 0
    wide = session.open(chat_call([USER], max_tokens=10_000))
    assert isinstance(wide, Sampling) and wide.max_new_tokens == 64 and wide.turn == 1


def test_a_running_request_is_joined_and_everyone_gets_the_answer(renderer: Renderer) -> None:
    session = session_with(renderer)
    body = orjson.dumps({"messages": [USER]})
    first, retry, third = raw_call(body), raw_call(body), raw_call(body)
    assert isinstance(session.open(first), Sampling)
    assert session.open(retry) == Waiting(joined=first.call)
    session.open(third)
    assert session.gone(first.call) is False
    answers = session.close(first.call, sampled([70, END]))
    assert [answer.call for answer in answers] == [retry.call, third.call]
    assert len({answer.chunks[0] for answer in answers}) == 1
    assert session.stats.turns == 1 and session.stats.retries_joined == 2


def test_a_finished_request_is_replayed_a_bounded_number_of_times(renderer: Renderer) -> None:
    session = session_with(renderer)
    body = orjson.dumps({"messages": [USER]})
    opened = session.open(raw_call(body))
    assert isinstance(opened, Sampling)
    assert session.gone(opened.call) is True
    assert session.close(opened.call, sampled([70, END])) == []
    for _ in range(MAX_REPLAYS):
        replayed = session.open(raw_call(body))
        assert isinstance(replayed, Answered) and replayed.answer.status == 200
    assert isinstance(session.open(raw_call(body)), Sampling)


def test_a_failed_request_is_told_to_all_and_sampled_anew(renderer: Renderer) -> None:
    session = session_with(renderer)
    body = orjson.dumps({"messages": [USER]})
    first, retry = raw_call(body), raw_call(body)
    session.open(first)
    session.open(retry)
    answers = session.fail(first.call, 503, "no cell")
    assert [(answer.call, answer.status) for answer in answers] == [(first.call, 503), (retry.call, 503)]
    assert orjson.loads(answers[0].chunks[0])["error"]["type"] == "server_error"
    assert session.stats.errors_sent == 2 and len(session.tree) == 0
    assert isinstance(session.open(raw_call(body)), Sampling)


def test_context_overflow_is_told_in_openais_words(renderer: Renderer) -> None:
    session = session_with(renderer, max_context_tokens=20)
    status, error = error_of(session.open(chat_call([{"role": "user", "content": "x" * 400}])))
    assert status == 400
    assert error["code"] == "context_length_exceeded" and error["type"] == "invalid_request_error"
    assert error["param"] == "messages"
    assert error["message"].startswith("This model's maximum context length is 20 tokens. However, your messages")
    assert session.stats.context_overflows == 1


def test_a_turn_gets_no_more_tokens_than_the_context_has_room_for(renderer: Renderer) -> None:
    session = session_with(renderer, max_context_tokens=30)
    opened = session.open(chat_call([USER]))
    assert isinstance(opened, Sampling) and len(opened.prompt) + opened.max_new_tokens == 30


def test_a_wrong_key_is_401_and_is_not_repeated(renderer: Renderer) -> None:
    status, error = error_of(session_with(renderer).open(raw_call(b"{}", key="sk-secret-of-somebody")))
    assert (status, error["code"]) == (401, "invalid_api_key")
    assert "secret" not in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"{}", "messages"),
        (b'{"messages": {}}', "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [1]}', "messages[0]"),
        (b'{"messages": [{"role": "user<|im_end|>", "content": "x"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages[0].content[0]"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{}]}]}', "messages[0].tool_calls[0]"),
        (b'{"messages": [{"role": "user"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user"}], "max_tokens": true}', "max_tokens"),
        (b'{"messages": [{"role": "user"}], "n": 2}', "n"),
        (b'{"messages": [{"role": "user"}], "tools": [1]}', "tools[0]"),
        (b'{"messages": [{"role": "user"}], "tools": [' + b'{"a":' * 400 + b"1" + b"}" * 400 + b"]}", "tools"),
    ],
)
def test_a_bad_request_is_400_and_names_the_field(renderer: Renderer, body: bytes, param: str | None) -> None:
    status, error = error_of(session_with(renderer).open(raw_call(body)))
    assert (status, error["param"], error["type"]) == (400, param, "invalid_request_error")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "text", "type", "function", "name", "arguments", "id", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
chat_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer"])},
    optional={"content": json_values | st.text(), "tool_calls": json_values, "tool_call_id": json_values},
)
bodies = st.one_of(
    st.binary(max_size=60),
    json_values.map(orjson.dumps),
    st.fixed_dictionaries(
        {"messages": st.lists(chat_messages, max_size=3) | json_values},
        optional={
            "tools": json_values,
            "stream": json_values,
            "max_tokens": json_values,
            "stream_options": json_values,
        },
    ).map(orjson.dumps),
)


@settings(max_examples=50, deadline=None)
@given(
    body=bodies,
    method=st.sampled_from(["POST", "GET", "PUT", ""]),
    path=st.text(max_size=9) | st.just("/v1/chat/completions"),
)
def test_nothing_that_a_client_sends_raises(renderer: Renderer, body: bytes, method: str, path: str) -> None:
    session = session_with(renderer)
    opened = session.open(raw_call(body, method=method, path=path))
    if isinstance(opened, Sampling):
        session.close(opened.call, sampled([70, END]))
    elif isinstance(opened, Answered):
        assert opened.answer.status in (200, 400, 404)


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a": "\\ud800"}', '{"a":' * 900 + "1" + "}" * 900, "null"])
def test_odd_tool_arguments_still_render(renderer: Renderer, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert isinstance(session_with(renderer).open(chat_call([*history, {"role": "tool", "content": "x"}])), Sampling)


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions", "/v1/v1/chat/completions/?a=b"])
def test_paths_with_and_without_v1_are_served(renderer: Renderer, path: str) -> None:
    assert bare_path(path) == "/chat/completions"
    assert isinstance(session_with(renderer).open(chat_call([USER], path=path)), Sampling)


def test_models_are_listed_and_unknown_paths_are_404(renderer: Renderer) -> None:
    session = session_with(renderer)
    listed = session.open(raw_call(b"", method="GET", path="/v1/models"))
    assert isinstance(listed, Answered)
    assert orjson.loads(listed.answer.chunks[0])["data"][0]["id"] == "policy"
    assert error_of(session.open(raw_call(b"", path="/v1/images")))[0] == 404


def test_a_stream_is_role_content_finish_usage_done(renderer: Renderer) -> None:
    session = session_with(renderer)
    opened = session.open(chat_call([USER], stream=True, stream_options={"include_usage": True}))
    assert isinstance(opened, Sampling)
    (answer,) = session.close(opened.call, sampled([70, 71, 72], FinishReason.LENGTH))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.chunks[-1] == b"data: [DONE]\n\n"
    events = [orjson.loads(chunk.removeprefix(b"data: ")) for chunk in answer.chunks[:-1]]
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[1]["choices"][0]["delta"]["content"] == renderer.template.decode(sampled([70, 71, 72]).tokens)
    assert events[2]["choices"][0]["finish_reason"] == "length"
    assert events[3]["choices"] == [] and events[3]["usage"]["completion_tokens"] == 3


def recorded(name: str) -> list[dict[str, Any]]:
    """The request bodies of a recorded session, in order."""
    bodies: list[dict[str, Any]] = []
    tools: dict[str, Any] = {}
    for line in (DATA / name).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        body = entry["body"]
        if "$same_body_as_previous" in body:
            body = bodies[-1]
        if "toolset" in entry:
            tools[entry["toolset"]] = body["tools"]
        if isinstance(body.get("tools"), dict):
            body = {**body, "tools": tools[body["tools"]["$same_as"]]}
        bodies.append(body)
    return bodies


@pytest.mark.parametrize("name", ["mini_chat.jsonl", "mini_chat_maxtok.jsonl"])
def test_recorded_requests_of_a_harness_are_served(renderer: Renderer, name: str) -> None:
    session = session_with(renderer)
    for body in recorded(name):
        opened = session.open(raw_call(orjson.dumps(body)))
        if isinstance(opened, Sampling):
            (answer,) = session.close(opened.call, sampled([70, END]))
            assert content_of(answer)
        else:
            assert isinstance(opened, Answered) and opened.answer.status == 200
    assert session.stats.errors_sent == 0 and session.stats.retokenised_tokens == 0
    assert session.tree.shared_tokens > 0
