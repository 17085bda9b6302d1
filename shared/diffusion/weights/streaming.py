"""Keeps weights of a network's blocks on the host, and brings them to the device block by block.

A block holds its weights while it is called, in sampling and in training: with gradient
checkpointing the backward pass calls it again. While a block computes, the weights of the block
that followed it the last time come to the device.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shared.diffusion.loading.host_memory import HostMemory, host_memory
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.models.memory import BLOCK


def stream(network: nn.Module, device: torch.device) -> None:
    """Has the frozen weights of a network's blocks, which are on the host, come to the device for
    each call of their block, and moves all other weights there. Trained weights must be attached
    already. Between its calls a block holds tensors of the meta device, with which nothing can
    compute."""
    trained = {id(parameter) for parameter in trained_parameters(network).values()}
    blocks = HostBlocks(network, host_memory(device))
    for name in [*dict(network.named_parameters()), *dict(network.named_buffers())]:
        owner, local = _slot(network, name)
        tensor = owner[local]
        if id(tensor) in trained or BLOCK.match(name) is None:
            tensor.data = tensor.data.to(device)
        else:
            blocks.store(name, tensor.detach())
            owner[local] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    blocks.attach(ExitStack())


@dataclass(eq=False, slots=True)
class _Block:
    slots: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Parameters or buffers of a module, and the name of each."""
    stored: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    """Values of the slots between two calls."""

    def exchange(self, tensors: list[Any]) -> list[Any]:
        previous = [owner[name] for owner, name in self.slots]
        for (owner, name), tensor in zip(self.slots, tensors, strict=True):
            owner[name] = tensor
        return previous


class HostBlocks:
    """Weights in the host's memory that blocks hold while they are called."""

    def __init__(self, network: nn.Module, memory: HostMemory) -> None:
        self._network, self._memory = network, memory
        self._blocks: dict[str, _Block] = {}
        self._last: tuple[_Block, bool, bool] | None = None
        """The newest call: its block, whether it has a gradient, whether a backward pass made
        it."""
        self._followers: dict[tuple[_Block, bool, bool], _Block] = {}
        self._coming: tuple[_Block, list[Tensor]] | None = None

    def store(self, name: str, tensor: Tensor) -> None:
        """Stores what the parameter or buffer of this name holds while its block is called, or if
        it is in no block, as long as these weights are used."""
        match = BLOCK.match(name)
        block = self._blocks.setdefault("" if match is None else match[0], _Block())
        block.slots.append(_slot(self._network, name))
        block.stored.append(self._memory.store(tensor))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Has the network use these weights meanwhile."""
        with ExitStack() as undo:
            self.attach(undo)
            yield
        self._memory.arrive()
        self._last = self._coming = None

    def attach(self, undo: ExitStack) -> None:
        """Has the network use these weights until ``undo`` is closed."""
        for path, block in self._blocks.items():
            if not path:
                undo.callback(self._end, block)
                self._begin(block)
                continue
            module = self._network.get_submodule(path)
            undo.enter_context(module.register_forward_pre_hook(partial(self._begin, block)))
            end = partial(self._end, block)
            undo.enter_context(module.register_forward_hook(end, always_call=True))

    def _begin(self, block: _Block, *_: object) -> None:
        is_recomputed = torch._C._current_graph_task_id() != -1
        before, self._last = self._last, (block, torch.is_grad_enabled(), is_recomputed)
        if before is not None:
            self._followers[before] = block
        self._memory.arrive()
        if self._coming is None or self._coming[0] is not block:
            self._coming = None  # frees its memory first
            self._coming = block, self._fetched(block)
            self._memory.arrive()
        tensors = self._coming[1]
        follower = self._followers.get(self._last)
        if follower is not block:
            self._coming = None if follower is None else (follower, self._fetched(follower))
        block.held = block.exchange(tensors)

    def _fetched(self, block: _Block) -> list[Tensor]:
        return [self._memory.fetch(each) for each in block.stored]

    @staticmethod
    def _end(block: _Block, *_: object) -> None:
        if block.held:
            block.exchange(block.held)
            block.held = []


def _slot(network: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, local = name.rpartition(".")
    owner = network.get_submodule(path)
    return (owner._parameters if local in owner._parameters else owner._buffers), local
