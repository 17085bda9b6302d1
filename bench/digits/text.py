"""The demo's 40 prompts, and tiny text encoders of the SD3 family that tell them apart.

A prompt asks for one of ten digits in one of four ways. The encoders are random and frozen. Every
word of the prompts is one token; any other text falls apart into single characters.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATES = (
    "a handwritten {word}",
    "the digit {word}",
    "the number {word}",
    "{word} written by hand",
)


def prompt_texts(digit: int) -> list[str]:
    return [template.format(word=WORDS[digit]) for template in TEMPLATES]


def all_prompts() -> list[tuple[str, int]]:
    """Returns (text, digit), by template and then by digit."""
    return [
        (template.format(word=word), digit)
        for template in TEMPLATES
        for digit, word in enumerate(WORDS)
    ]


NUM_TOKENS = 6
"""Length of a tokenized prompt: the longest has four words, and CLIP marks both ends."""
CLIP_WIDTH = 16
T5_WIDTH = 2 * CLIP_WIDTH
"""Both CLIP encoders side by side are as wide as T5, so that their tokens form one sequence."""


def build_text_parts(seed: int) -> dict[str, Any]:
    """Builds the six components, by their names in a StableDiffusion3Pipeline."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokenizer": clip,
        "tokenizer_2": clip_tokenizer(),
        "tokenizer_3": t5,
        "text_encoder": clip_encoder(clip, generator),
        "text_encoder_2": clip_encoder(clip, generator),
        "text_encoder_3": t5_encoder(t5, generator),
    }


def words_of(texts: Iterable[str]) -> list[str]:
    return sorted({word for text in texts for word in text.split()})


DEMO_WORDS = words_of(text for text, _ in all_prompts())


def clip_tokenizer(num_tokens: int = NUM_TOKENS, words: Sequence[str] = DEMO_WORDS) -> Any:
    """Builds a byte-level BPE whose merges spell out each known word from left to right."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    merges: list[tuple[str, str]] = []
    for word in words:
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        joined = pieces[0]
        for piece in pieces[1:]:
            if (joined, piece) not in merges:
                merges.append((joined, piece))
                tokens.append(joined + piece)
            joined += piece
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=merges,
        model_max_length=num_tokens,
    )


def t5_tokenizer(num_tokens: int = NUM_TOKENS, words: Sequence[str] = DEMO_WORDS) -> Any:
    """Builds a unigram model that prefers complete words."""
    from transformers import T5TokenizerFast

    letters = [chr(code) for code in range(33, 127)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -10.0)]
    pieces += [(f"▁{word}", -1.0) for word in words]
    pieces += [(letter, -10.0) for letter in letters]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=num_tokens)


def clip_encoder(tokenizer: Any, generator: torch.Generator) -> nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder: nn.Module = CLIPTextModelWithProjection(config)
    return randomized(encoder, generator)


def t5_encoder(tokenizer: Any, generator: torch.Generator) -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=T5_WIDTH,
        d_kv=8,
        d_ff=2 * T5_WIDTH,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    encoder: nn.Module = T5EncoderModel(config)
    return randomized(encoder, generator)


@torch.no_grad()
def randomized(encoder: nn.Module, generator: torch.Generator) -> nn.Module:
    """Unit embeddings, and linear layers that keep a unit's scale.

    The usual initialisation is so small that the pooled vector hardly depends on the prompt.
    """
    for module in encoder.modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, 1.0, generator=generator)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0.0, module.in_features**-0.5, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
    return encoder.requires_grad_(False).eval()
