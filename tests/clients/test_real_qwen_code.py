"""Qwen Code, unmodified, in a real sandbox, through the gateway, with a scripted policy."""

from pathlib import Path

from gyre.wire.messages import AgentEnded, Graded
from tests.clients.real_clients import run
from tests.clients.scripted_front import Asked, Fail, Say, Served, assert_sampled_once

HARNESS = "qwen-code"


def test_it_ends_in_order_with_the_last_turn_as_its_word(tmp_path: Path) -> None:
    def check(served: Served, ended: AgentEnded, _: Graded) -> None:
        assert (ended.end, ended.detail) == ("done", "rc=0 I am done.")
        assert_sampled_once(served)
        assert len(served.session.turns) == 1
        assert served.session.stats.forks == 0

    run(tmp_path, HARNESS, lambda _: Say(text="I am done."), check)


def test_a_failed_call_is_tried_again_and_leaves_no_trace_in_the_tree(tmp_path: Path) -> None:
    def policy(asked: Asked) -> Say | Fail:
        return Fail() if asked.number == 0 else Say(text="Done after all.")

    def check(served: Served, ended: AgentEnded, _: Graded) -> None:
        assert (ended.end, ended.detail) == ("done", "rc=0 Done after all.")
        assert [one.body for one in served.asked[1:]] == [served.asked[0].body]
        assert len(served.session.turns) == 1
        assert_sampled_once(served)

    run(tmp_path, HARNESS, policy, check)
