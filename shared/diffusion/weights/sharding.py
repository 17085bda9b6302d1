"""FSDP2: every rank keeps a shard of the network's weights, and gathers a block for its passes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shared.diffusion.weights.trained_weights import is_adapter, trained_parameters


def ranks_mesh(device: torch.device) -> DeviceMesh:
    """Returns the mesh of all ranks; each rank has a device of this type."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def shard(
    network: nn.Module, mesh: DeviceMesh | None = None, *, passes_in: torch.dtype | None = None
) -> None:
    """Shards the weights over all ranks, in place. Before, all ranks hold the same weights, or all
    weights are on the meta device.

    An adapter is not sharded: it is small, and its gradient is summed once per update. If all
    weights are trained, weights, gradients and optimizer state are sharded, and gradients are
    summed in every backward pass.

    Args:
        mesh: mesh of the ranks, if their device differs from the device of the weights.
        passes_in: compute dtype of passes, to which float32 shards are rounded; gradients are
            summed in float32. Only weights of this dtype are sharded. The few weights that a
            network keeps in float32 are not sharded.
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
    """Gather all weights on each rank; passes then exchange no weights until `hold_part`. A
    collective operation of all ranks."""
    for module in _sharded(network):
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()


def hold_part(network: nn.Module) -> None:
    """Reduce each rank to its shard of the weights; passes gather blocks again."""
    modules = _sharded(network)
    for module in modules:
        module.set_reshard_after_forward(True, recurse=False)
        module.reshard()
    # Backward passes prefetch in the order of earlier passes, whose number differs between ranks.
    modules[0].reset_iter_state()


def _sharded(network: nn.Module) -> list[FSDPModule]:
    return [each for each in network.modules() if isinstance(each, FSDPModule)]
