"""Keeps a network's blocks on the host, and brings them to the device one after the other.

diffusers' group offload does it, block by block: on a GPU the next block comes while this one is
computed. It takes every parameter of a block along, and puts back what the parameter held when it
was set up. An adapter is adopted by exchanging pointers (`shared.diffusion.weights`), so it has to
stay out of that: it remains on the device, as does all that is outside of the blocks.

It is for passes without gradients alone: a backward pass would find the weights gone.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from shared.diffusion.experts import networks_of
from shared.diffusion.weights import trained_parameters
from shared.models.memory import BLOCK

Tensors = Mapping[str, torch.Tensor]


def stream(network: nn.Module, device: torch.device) -> None:
    """Has the blocks of a network that lies on the host come to the device when it is their turn.

    What is trained must be attached already. On a CPU the blocks stay where they are, and only the
    hooks are run.
    """
    from diffusers.hooks import apply_group_offloading

    networks = list(networks_of(network).values())
    for each in networks:
        apply_group_offloading(
            each,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=device.type == "cuda",
        )
    trained = {id(parameter) for parameter in trained_parameters(network).values()}
    for group in offloaded_groups(network):
        is_block = group.onload_leader not in networks
        streamed = []
        for tensor in _tensors(group):
            if is_block and id(tensor) not in trained:
                streamed.append(tensor)
            else:
                group.cpu_param_dict.pop(tensor, None)
                tensor.data = tensor.data.to(device)
        group.modules, group.parameters, group.buffers = [], streamed, []


def offloaded_groups(network: nn.Module) -> Iterator[Any]:
    """Yields diffusers' groups of the network's modules, each once."""
    seen = set[int]()
    for module in network.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hook = registry and registry.get_hook("group_offloading")
        if hook and id(hook.group) not in seen:
            seen.add(id(hook.group))
            yield hook.group


def _tensors(group: Any) -> list[torch.Tensor]:
    """Returns the parameters and buffers of a group and of its modules."""
    own = [*group.parameters, *group.buffers]
    return own + [t for m in group.modules for t in (*m.parameters(), *m.buffers())]


@contextmanager
def using_from_host(network: nn.Module, tensors: Tensors) -> Iterator[None]:
    """Has a network compute with other trained weights, which lie on the host: those of a block
    come to the device for each of its calls, all others at once."""
    parameters, blocks = trained_parameters(network), dict[str, list[str]]()
    for name in tensors:
        found = BLOCK.match(name)
        blocks.setdefault("" if found is None else found[0], []).append(name)
    with ExitStack() as undo:
        for block, names in blocks.items():
            lent = _Lent({n: parameters[n] for n in names}, {n: tensors[n] for n in names})
            if block:
                module = network.get_submodule(block)
                undo.enter_context(module.register_forward_pre_hook(lent.bring))
                undo.enter_context(module.register_forward_hook(lent.put_back, always_call=True))
            else:
                undo.callback(lent.put_back)
                lent.bring()
        yield


class _Lent:
    """Parameters that hold other weights for a while."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], tensors: Tensors) -> None:
        self._parameters, self._tensors = parameters, tensors
        self._held: dict[str, torch.Tensor] = {}

    def bring(self, *_: object) -> None:
        self._held = {name: each.data for name, each in self._parameters.items()}
        for name, each in self._parameters.items():
            each.data = self._tensors[name].to(each.device, non_blocking=True)

    def put_back(self, *_: object) -> None:
        for name, held in self._held.items():
            self._parameters[name].data = held
        self._held = {}
