"""Attention of Qwen-Image's blocks for rows of which half have a shorter text than the others.

Everything else in a block goes through all rows in one call, padded. Attention takes each half by
itself, and leaves the padding out of keys and values: no mask, so that it stays flash attention.
"""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    apply_rotary_emb_qwen,
)
from torch import Tensor, nn


class HalvesAttention(QwenDoubleStreamAttnProcessor2_0):  # type: ignore[misc]
    """Diffusers' processor, to which ``text_lengths`` may give how many tokens of its text each
    half of the rows has."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        text_lengths: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention output of the tokens of the image, and of the text (B, L, width)."""
        if text_lengths is None:
            result: tuple[Tensor, Tensor] = super().__call__(
                attn, hidden_states, encoder_hidden_states, encoder_hidden_states_mask,
                attention_mask, image_rotary_emb,
            )  # fmt: skip
            return result
        assert image_rotary_emb is not None
        of_image, of_text = image_rotary_emb
        image = _projected(
            attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k),
            of_image,
        )  # fmt: skip
        text = _projected(
            attn, encoder_hidden_states, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
            (attn.norm_added_q, attn.norm_added_k), of_text,
        )  # fmt: skip
        joint = [torch.cat(pair, dim=1).chunk(2) for pair in zip(text, image, strict=True)]
        sizes = [encoder_hidden_states.shape[1], hidden_states.shape[1]]
        texts, images = [], []
        for query, *others, length in zip(*joint, text_lengths, strict=True):
            key, value = (_without_padding(each, length, sizes) for each in others)
            attention = dispatch_attention_fn(query, key, value, backend=self._attention_backend)
            own_text, own_image = attention.flatten(2).split(sizes, dim=1)
            texts.append(own_text)
            images.append(own_image)
        return attn.to_out[0](torch.cat(images)), attn.to_add_out(torch.cat(texts))


def _projected(
    attn: Any,
    tokens: Tensor,
    layers: tuple[nn.Module, nn.Module, nn.Module],
    norms: tuple[nn.Module, nn.Module],
    rotation: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query, key and value (B, L, heads, width of one) of tokens (B, L, width)."""
    width = attn.inner_dim // attn.heads
    query, key, value = (layer(tokens).unflatten(-1, (-1, width)) for layer in layers)
    query, key = (
        apply_rotary_emb_qwen(norm(each), rotation, use_real=False)
        for norm, each in zip(norms, (query, key), strict=True)
    )
    return query, key, value


def _without_padding(joint: Tensor, length: int, sizes: list[int]) -> Tensor:
    """Leaves out of text and image (B, L + N, ...) what comes after ``length`` tokens of text."""
    text, image = sizes
    if length == text:
        return joint
    kept, _, image_part = joint.split([length, text - length, image], dim=1)
    return torch.cat([kept, image_part], dim=1)
