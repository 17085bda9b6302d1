"""What a block computes again in the backward pass, and what it keeps (gradient checkpointing).

True keeps a block's inputs alone. "selective" keeps what torch's attention has given as well: the
dearest part of a block where there are many tokens, and one tensor of a block's width for each
token. Attention back ends that are not torch's own are computed again. The gradient is the same to
the bit either way.
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Torch's fused attention; what has none is made of matrix products, and computed again."""


def checkpoint_blocks(network: nn.Module, keeping: Literal[True, "selective"]) -> None:
    """Has the blocks of a network of diffusers compute their activations again, in place."""
    network.enable_gradient_checkpointing(  # type: ignore[operator]
        _keeping_attention if keeping == "selective" else None
    )


def _keeping_attention(block: nn.Module, *inputs: Any) -> Any:
    kept = [getattr(torch.ops.aten, name).default for name in KERNELS]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(block.__call__, *inputs, use_reentrant=False, context_fn=contexts)
