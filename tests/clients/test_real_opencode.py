"""OpenCode, unmodified, in a real sandbox, through the gateway, with a scripted policy."""

from pathlib import Path

from gyre.wire.messages import AgentEnded, Graded
from tests.clients.real_clients import run
from tests.clients.scripted_front import Asked, Fail, Say, Served, assert_sampled_once

HARNESS = "opencode"


def is_title(asked: Asked) -> bool:
    """The call that names the conversation has no tools."""
    return "tools" not in asked.body


def test_it_ends_in_order_and_its_title_is_a_conversation_of_its_own(tmp_path: Path) -> None:
    def check(served: Served, ended: AgentEnded, _: Graded) -> None:
        assert ended.end == "done", ended
        assert sorted(map(is_title, served.asked)) == [False, True]
        assert_sampled_once(served)
        assert len(served.session.turns) == 2

    run(tmp_path, HARNESS, lambda asked: Say(text="A title" if is_title(asked) else "I am done."), check)


def test_a_failed_call_is_tried_again_and_leaves_no_trace_in_the_tree(tmp_path: Path) -> None:
    failed: list[Asked] = []

    def policy(asked: Asked) -> Say | Fail:
        if not is_title(asked) and not failed:
            failed.append(asked)
            return Fail()
        return Say(text="Fine.")

    def check(served: Served, ended: AgentEnded, _: Graded) -> None:
        assert ended.end == "done", ended
        main = [one for one in served.asked if not is_title(one)]
        assert len(main) == 2
        assert main[0].body == main[1].body
        assert_sampled_once(served)

    run(tmp_path, HARNESS, policy, check)
