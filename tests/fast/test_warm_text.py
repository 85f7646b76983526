"""What the policy is warmed up on is what it is later shown: the same ids that the gateway renders."""

import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gyre.gateway.template import ChatTemplate
from gyre.program.warm_text import CHATML, CONTEXT_WEIGHT, END, encode
from gyre.tasks.shell import Kind, draw
from gyre.tasks.shell_demos import Demonstration, Habits, demonstrate, script

POLICY = Path(__file__).parents[2] / "configs" / "quickstart" / "policy"


def demonstrations() -> list[Demonstration]:
    rng = random.Random(5)
    tasks = [draw(rng, kind) for kind in Kind]
    return [demonstrate(task, script(task, rng, Habits(look=0.5, linger=0.5))) for task in tasks]


def test_a_demonstration_is_encoded_as_the_gateway_renders_it() -> None:
    tokenizer = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
    template = ChatTemplate.load(POLICY)
    for each in demonstrations():
        shown = [{"role": role, "content": text} for role, text in each.messages]
        before = len(shown) - 1
        prompt = template.encode(template.text(shown[:before]))
        lesson = encode(tokenizer, each.messages)
        assert lesson.tokens[: len(prompt)].tolist() == prompt.tolist()


def test_only_what_the_policy_says_has_full_weight() -> None:
    tokenizer = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
    for each in demonstrations():
        lesson = encode(tokenizer, each.messages)
        said = tokenizer.decode(lesson.tokens[lesson.weights == 1].tolist(), skip_special_tokens=False)
        assert said == "".join(text + END for role, text in each.messages if role == "assistant")
        assert lesson.weights[0] == 0
        assert set(np.unique(lesson.weights[1:])) == {np.float32(CONTEXT_WEIGHT), np.float32(1)}


def test_the_committed_policy_is_small_and_carries_its_template() -> None:
    assert {path.name for path in POLICY.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert sum(path.stat().st_size for path in POLICY.iterdir()) < 5_000_000
    assert ChatTemplate.load(POLICY).end_of_turn_text == END
    assert json.loads((POLICY / "tokenizer_config.json").read_text())["chat_template"] == CHATML
