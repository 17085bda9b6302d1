"""Keeps a network's blocks on the host, and brings them to the device one after the other.

diffusers' group offload does it, block by block: on a GPU the next block comes while this one is
computed. It takes every parameter of a block along, and puts back what the parameter held when it
was set up. An adapter is adopted by exchanging pointers (`shared.diffusion.weights`), so it has to
stay out of that: it remains on the device, as does all that is outside of the blocks.

It is for sampling alone: a backward pass would find the weights gone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shared.diffusion.experts import networks_of
from shared.diffusion.weights import trained_parameters


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
