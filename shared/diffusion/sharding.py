"""FSDP2: every rank keeps a share of the network's weights, and gathers a block for its passes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shared.diffusion.weights import is_adapter, trained_parameters


def shard(network: nn.Module) -> None:
    """Share the weights among all ranks, in place; each has to hold the same ones before.

    An adapter stays whole on every rank: it is small, and its gradient is then summed once per
    batch. Weights that are trained themselves are sharded with their gradients and their optimizer
    state, and their gradients are summed in every backward pass: whole, they would not fit.
    """
    mesh = init_device_mesh(_device_type(network), (dist.get_world_size(),))
    kept = set(trained_parameters(network).values()) if is_adapter(network) else set()
    names = set(getattr(network, "_no_split_modules", None) or ())
    blocks = [each for each in network.modules() if type(each).__name__ in names]
    for module in (*reversed(blocks), network):  # children before their parents
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=kept)


def _device_type(network: nn.Module) -> str:
    device: torch.device = next(network.parameters()).device
    return device.type
