"""FSDP2: every rank keeps a share of the network's weights, and gathers a block for its passes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shared.diffusion.weights.trained_weights import is_adapter, trained_parameters


def ranks_mesh(device: torch.device) -> DeviceMesh:
    """Returns the mesh of all ranks, each with a device of this kind."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def shard(
    network: nn.Module, mesh: DeviceMesh | None = None, *, passes_in: torch.dtype | None = None
) -> None:
    """Shards the weights over all ranks, in place; each has to hold the same ones before, or all of
    them none (on the meta device).

    An adapter stays whole on every rank: it is small, and its gradient is then summed once per
    update. Weights that are trained themselves are sharded with their gradients and their optimizer
    state, and their gradients are summed in every backward pass: whole, they would not fit.

    ``mesh``: of the ranks, if it differs from the device of the weights. ``passes_in``: the type to
    which passes round float32 shards; gradients are summed in float32. Only weights of that type
    are sharded then: those that a network keeps in float32 are few, and stay whole.
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


def hold_whole(network: nn.Module) -> None:
    """Gather all weights on each rank, as passes use them: passes exchange nothing until
    `hold_part`. All ranks do it together."""
    for module in _sharded(network):
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()


def hold_part(network: nn.Module) -> None:
    """Leave each rank its part of the weights alone; each pass gathers a block for itself."""
    modules = _sharded(network)
    for module in modules:
        module.set_reshard_after_forward(True, recurse=False)
        module.reshard()
    # Backward passes prefetch by the order of the passes before. Ranks have taken unlike numbers.
    modules[0].reset_iter_state()


def _sharded(network: nn.Module) -> list[FSDPModule]:
    return [each for each in network.modules() if isinstance(each, FSDPModule)]
