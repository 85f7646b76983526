"""A tiny random Qwen3 folder: what a real checkpoint looks like, in half a megabyte.

`build_tiny_model` writes config.json, one fp32 safetensors file and a byte-level tokenizer whose ids are the
256 bytes (0..255, in the tokenizer library's own byte order) and three ChatML specials after them. Same seed,
same weights. The weights are drawn wide (standard deviation 0.2) so that sampling is neither flat nor certain.
"""

from dataclasses import dataclass
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """Where the folder is, and the ids a test needs."""

    path: Path
    vocab_size: int
    end_of_text: int
    im_start: int
    im_end: int


def build_tiny_model(
    path: Path, *, seed: int = 0, num_layers: int = 2, tie_word_embeddings: bool = False, max_positions: int = 4096
) -> TinyModel:
    """Write the folder at `path` (made if need be) and describe it."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS))
    end_of_text, im_start, im_end = (inner.token_to_id(special) for special in SPECIALS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    vocab_size = 272  # 259 rounded up to a multiple of 16, so that it divides over tensor-parallel ranks.
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=0.2,
        eos_token_id=im_end,
        pad_token_id=end_of_text,
        bos_token_id=None,
    )
    # The caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.save_pretrained(path)
    return TinyModel(path=path, vocab_size=vocab_size, end_of_text=end_of_text, im_start=im_start, im_end=im_end)
