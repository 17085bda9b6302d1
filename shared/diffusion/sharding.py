"""FSDP2: every rank keeps a share of the network's weights, and gathers a block for its passes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shared.diffusion.weights import is_adapter, trained_parameters


def shard(network: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Shards the weights over all ranks, or those of ``mesh``, in place; each has to hold the same
    ones before.

    An adapter stays whole on every rank: it is small, and its gradient is then summed once per
    batch. Weights that are trained themselves are sharded with their gradients and their optimizer
    state, and their gradients are summed in every backward pass: whole, they would not fit.
    """
    device: torch.device = next(network.parameters()).device
    mesh = mesh or init_device_mesh(device.type, (dist.get_world_size(),))
    kept = set(trained_parameters(network).values()) if is_adapter(network) else set()
    names = set(getattr(network, "_no_split_modules", None) or ())
    blocks = [each for each in network.modules() if type(each).__name__ in names]
    for module in (*reversed(blocks), network):  # children before their parents
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=kept)


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sums gradients over all ranks, in one exchange; every parameter has a gradient.

    Sharded gradients are averaged over ranks in every backward pass: here they are only scaled.
    """
    replicated: list[Tensor] = []
    for parameter in parameters:
        assert parameter.grad is not None
        if isinstance(parameter.grad, DTensor):
            parameter.grad.mul_(dist.get_world_size())
        else:
            replicated.append(parameter.grad)
    if not replicated:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in replicated])
    dist.all_reduce(flat)
    for gradient, total in zip(
        replicated, flat.split([g.numel() for g in replicated]), strict=True
    ):
        gradient.copy_(total.view_as(gradient))
