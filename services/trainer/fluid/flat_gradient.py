"""The gradient of all trained weights as one flat tensor, of which ranks of a group hold rows."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from services.trainer.engine.world import num_ranks, this_rank
from services.trainer.fluid.sums import Ranges, SumLayout
from shared.diffusion.loading.ranks import flat_range, local_shard

NORM_NUMBERS = 1 << 24
"""Numbers that are squared at a time, in float64: all of them would take four times their bytes."""


class FlatGradient:
    """Reads and writes the gradients of all parameters. For a sharded parameter it holds this
    rank's rows. Gradients of parameters that every rank holds whole are summed over ranks, and the
    first rank holds the sum."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """``parameters``: in the order of the flat tensor."""
        self._parameters = parameters
        self._is_group = num_ranks() > 1
        first = next(iter(parameters.values()))
        size = sum(each.numel() for each in parameters.values())
        ranges = tuple(self._ranges()) if self._is_group else None
        is_whole = ranges == ((0, size),)
        device = local_shard(first).device
        self.layout = SumLayout(size, first.dtype, device, None if is_whole else ranges)

    def _ranges(self) -> Ranges:
        """Return what this rank holds; runs that follow one another are one."""
        ranges: list[tuple[int, int]] = []
        begins = 0
        for parameter in self._parameters.values():
            first, number = flat_range(parameter)
            first += begins
            begins += parameter.numel()
            if not number or not self._is_held(parameter):
                continue
            if ranges and sum(ranges[-1]) == first:
                first, number = ranges[-1][0], ranges.pop()[1] + number
            ranges.append((first, number))
        return tuple(ranges)

    def _is_held(self, parameter: Tensor) -> bool:
        return isinstance(parameter, DTensor) or not self._is_group or this_rank() == 0

    @torch.no_grad()
    def taken(self) -> Tensor | None:
        """Copy the accumulated gradients, over all ranks; None without any."""
        if all(each.grad is None for each in self._parameters.values()):
            return None
        whole = iter(self._summed_over_ranks())
        parts = (
            _own_part(each) if isinstance(each, DTensor) else next(whole)
            for each in self._parameters.values()
        )
        gradients = zip(parts, self._parameters.values(), strict=True)
        own = [each.reshape(-1) for each, parameter in gradients if self._is_held(parameter)]
        return torch.cat(own) if own else self.layout.zeros()

    def _summed_over_ranks(self) -> list[Tensor]:
        """Return the gradients of what lies whole on every rank, summed in one exchange."""
        sums = [
            torch.zeros_like(each) if each.grad is None else each.grad
            for each in self._parameters.values()
            if not isinstance(each, DTensor)
        ]
        if self._is_group and sums:
            flat = torch.cat([each.reshape(-1) for each in sums])
            dist.all_reduce(flat)
            sums = list(flat.split([each.numel() for each in sums]))
        return sums

    def norm(self, flat: Tensor) -> Tensor:
        """Return the norm () of a flat gradient, over all ranks."""
        if self.layout.ranges is None:
            return get_total_norm(list(self.parts(flat).values()))
        parts = [part.double().square().sum() for part in flat.split(NORM_NUMBERS)]
        squares = torch.stack(parts).sum()
        dist.all_reduce(squares)
        return squares.sqrt().to(flat.dtype)

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the gradient of each parameter, in place where this rank holds it."""
        places = self._parameters.items()
        sizes = [flat_range(each)[1] if self._is_held(each) else 0 for _, each in places]
        gradients: dict[str, Tensor] = {}
        for (name, parameter), part in zip(places, flat.split(sizes), strict=True):
            if isinstance(parameter, DTensor):
                gradients[name] = _sharded_like(parameter, part)
            elif self._is_held(parameter):
                gradients[name] = part.view_as(parameter)
            else:
                gradients[name] = torch.empty_like(parameter)
        return gradients

    def spread(self, parts: Mapping[str, Tensor]) -> None:
        """Have all ranks hold what lies whole on each, as the first has it: in one exchange."""
        whole = [each for each in parts.values() if not isinstance(each, DTensor)]
        if self._is_group and whole:
            flat = torch.cat([each.reshape(-1) for each in whole])
            dist.broadcast(flat, 0)
            for each, values in zip(whole, flat.split([w.numel() for w in whole]), strict=True):
                each.copy_(values.view_as(each))


def _own_part(parameter: DTensor) -> Tensor:
    """Return what this rank has of a sharded gradient; FSDP2 averages over ranks in each backward
    pass."""
    own = torch.zeros_like(local_shard(parameter))
    grad = parameter.grad
    return own if grad is None else own.add_(local_shard(grad), alpha=num_ranks())


def _sharded_like(parameter: DTensor, part: Tensor) -> DTensor:
    own = part.view(local_shard(parameter).shape)
    return DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
