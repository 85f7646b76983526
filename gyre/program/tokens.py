"""Token ids as text to look at, with the tokenizer of a model folder; the ids themselves where there is none."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer


def reader_of(model: Path) -> Callable[[Sequence[int]], list[str]]:
    """A function from ids to one text a token. Bytes of a character that several tokens share show as U+FFFD."""
    path = model / "tokenizer.json"
    if not path.is_file():
        return lambda ids: [f"{token} " for token in ids]
    tokenizer = Tokenizer.from_file(str(path))
    known: dict[int, str] = {}

    def read(ids: Sequence[int]) -> list[str]:
        for token in ids:
            if token not in known:
                known[token] = tokenizer.decode([token], skip_special_tokens=False)
        return [known[token] for token in ids]

    return read
