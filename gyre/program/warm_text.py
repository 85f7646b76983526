"""The tokenizer of a warmed-up policy and its demonstrations as token ids with weights.

A byte-level BPE with single digits and the three control tokens of ChatML. A conversation is encoded as the
gateway renders it: each text between control tokens by itself, and each turn of the policy by itself, as it
would have sampled it. Torch-free.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gyre.tasks.shell_demos import Demonstration
from gyre.types import Float32, Int32

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT_WEIGHT = 0.1
"""Of predicting a token that the policy does not say, against 1 for one that it does: a cheap second lesson."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One conversation: `tokens` and the weight of predicting each, shape (T,); weights[0] is 0."""

    tokens: Int32
    weights: Float32


def train_tokenizer(demonstrations: Iterable[Demonstration], vocab_size: int) -> Tokenizer:
    """A BPE of exactly `vocab_size` entries, learned from what is said in the demonstrations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = ["\n".join(f"{role}\n{text}" for role, text in each.messages) for each in demonstrations]
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == vocab_size, (tokenizer.get_vocab_size(), vocab_size)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> tuple[Path, Path]:
    """Write tokenizer.json and tokenizer_config.json (with the ChatML template) and return their paths."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": 2048,
        "chat_template": CHATML,
    }
    paths = folder / "tokenizer.json", folder / "tokenizer_config.json"
    paths[0].write_text(tokenizer.to_str(pretty=False) + "\n")
    paths[1].write_text(json.dumps(config, indent=2) + "\n")
    return paths


def encode(tokenizer: Tokenizer, messages: Sequence[tuple[str, str]]) -> Lesson:
    """A conversation as ChatML ids; what the policy says, its end-of-turn token included, has weight 1."""
    start, end = tokenizer.token_to_id(START), tokenizer.token_to_id(END)

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    tokens: list[int] = []
    weights: list[float] = []
    for role, text in messages:
        if role == "assistant":
            before, said = [start, *ids_of("assistant\n")], [*ids_of(text), end]
        else:
            before, said = [start, *ids_of(f"{role}\n{text}"), end], []
        after = ids_of("\n")
        tokens += before + said + after
        weights += [CONTEXT_WEIGHT] * len(before) + [1.0] * len(said) + [CONTEXT_WEIGHT] * len(after)
    weights[0] = 0.0
    return Lesson(tokens=np.array(tokens, np.int32), weights=np.array(weights, np.float32))
