"""FSDP2: every rank keeps a share of the network's weights, and gathers a block for its passes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from shared.diffusion.ranks import full_tensor, local_shard
from shared.diffusion.weights import is_adapter, trained_parameters


def ranks_mesh(device: torch.device) -> DeviceMesh:
    """Returns the mesh of all ranks, each with a device of this kind."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def shard(
    network: nn.Module, mesh: DeviceMesh | None = None, *, passes_in: torch.dtype | None = None
) -> None:
    """Shards the weights over all ranks, in place; each has to hold the same ones before, or all of
    them none (on the meta device).

    An adapter stays whole on every rank: it is small, and its gradient is then summed once per
    batch. Weights that are trained themselves are sharded with their gradients and their optimizer
    state, and their gradients are summed in every backward pass: whole, they would not fit.

    ``mesh``: of the ranks, if it is not that of the device which the weights are on. ``passes_in``:
    the type to which passes round float32 shards; gradients are summed in float32. Only weights of
    that type are sharded then: those that a network keeps in float32 are few, and stay whole.
    """
    mesh = mesh or ranks_mesh(next(network.parameters()).device)
    whole = set(trained_parameters(network).values()) if is_adapter(network) else set()
    policy = MixedPrecisionPolicy()
    if passes_in is not None:
        whole |= {each for each in network.parameters() if each.dtype != passes_in}
        for each in set(network.parameters()) - whole:
            each.data = each.data.to(torch.float32)
        policy = MixedPrecisionPolicy(passes_in, torch.float32, cast_forward_inputs=False)
    names = set(getattr(network, "_no_split_modules", None) or ())
    blocks = [each for each in network.modules() if type(each).__name__ in names]
    for module in (*reversed(blocks), network):  # children before their parents
        fully_shard(
            module, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=whole
        )


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


@torch.no_grad()
def clip_gradients(gradients: Iterable[Tensor], limit: float) -> float:
    """Scales gradients so that the norm of all of them together, over all ranks, is at most
    ``limit``; returns the norm that they had."""
    gradients = list(gradients)
    sharded = [each for each in gradients if isinstance(each, DTensor)]
    whole = [each for each in gradients if not isinstance(each, DTensor)]
    norms = [full_tensor(get_total_norm(each)) for each in (sharded, whole) if each]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for each in gradients:
        local_shard(each).mul_(factor.to(each.device))
    return float(norm)
