"""Recomputation of blocks in the backward pass, and the tensors that are kept (gradient
checkpointing).

True keeps a block's inputs alone. "selective" keeps what torch's attention has given as well: the
dearest part of a block where there are many tokens, and one tensor of a block's width for each
token. Attention back ends that are not torch's own are computed again. "offloaded" keeps a block's
inputs in the host's memory. The gradient is the same to the bit in all three ways.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shared.diffusion.loading.host_memory import HostMemory

KERNELS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Torch's fused attention; what has none is made of matrix products, and computed again."""


def checkpoint_blocks(
    network: nn.Module,
    keeping: Literal[True, "selective", "offloaded"],
    memory: HostMemory | None = None,
) -> None:
    """Has the blocks of a network of diffusers compute their activations again, in place. Offloaded
    tensors are in ``memory``, by default the CPU's."""
    by: dict[bool | str, Callable[..., Any] | None] = {
        True: None, "selective": _keeping_attention,
        "offloaded": _Offloading(memory or HostMemory()),
    }  # fmt: skip
    network.enable_gradient_checkpointing(by[keeping])  # type: ignore[operator]


def _keeping_attention(block: nn.Module, *inputs: Any) -> Any:
    kept = [getattr(torch.ops.aten, name).default for name in KERNELS]
    contexts = partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(block.__call__, *inputs, use_reentrant=False, context_fn=contexts)


class _Offloading:
    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._newest: Callable[[], _Inputs | None] = lambda: None

    def __call__(self, block: nn.Module, *inputs: Any) -> Any:
        saved = _Inputs(self._memory, inputs, self._newest)
        self._newest = ref(saved)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            return checkpoint(block.__call__, *inputs, use_reentrant=False)


class _Inputs:
    """The inputs of one block's call that have a gradient, and the inputs of the block ``before``,
    which the backward pass needs next. Others, such as positions, are the same tensors for all
    blocks."""

    def __init__(
        self, memory: HostMemory, inputs: tuple[Any, ...], before: "Callable[[], _Inputs | None]"
    ) -> None:
        self._memory = memory
        self._before = before
        self._storages = {
            each.untyped_storage()._cdata
            for each in inputs
            if isinstance(each, Tensor) and each.requires_grad
        }
        self._stored: list[Any] = []
        self._fetched: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor | int:
        if tensor.untyped_storage()._cdata not in self._storages:
            return tensor
        self._stored.append(self._memory.store(tensor))
        return len(self._stored) - 1

    def unpack(self, packed: Tensor | int) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not self._fetched:
            self.fetch()
        self._memory.arrive()
        tensor = self._fetched.pop(packed)
        before = self._before()
        if not self._fetched and before is not None:
            before.fetch()
        return tensor

    def fetch(self) -> None:
        self._fetched = {n: self._memory.fetch(each) for n, each in enumerate(self._stored)}

    def __del__(self) -> None:
        if self._fetched:  # by a backward pass that failed
            self._memory.arrive()
