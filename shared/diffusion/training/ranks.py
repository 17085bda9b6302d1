"""Several ranks train one network: what they add up, once per batch."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Over all ranks, in one exchange; every parameter has a gradient.

    Sharded ones have met in every backward pass already, but have the ranks' mean.
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
