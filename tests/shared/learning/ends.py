"""An algorithm with rows of its own: samples are noised by half, and good ones are denoised to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.diffusion.loading.models import Conditions, repeat_rows
from shared.diffusion.sampling.sampler import Denoising
from shared.diffusion.sampling.tensors import pack, unpack, unpack_conditions
from shared.diffusion.training.loss import Surrogate
from shared.diffusion.training.objective import Behaviour, LossTerms, Network
from shared.diffusion.training.rows import RowKind, check_alike, check_size, chunks
from shared.errors import ContractError
from shared.recipe.recipe import Recipe
from shared.recipe.sampling import Algorithm


@dataclass(frozen=True, slots=True)
class EndRows:
    ends: Tensor
    """(B, ...)"""
    advantage: Tensor
    """(B,)"""
    conditions: Conditions


@dataclass(frozen=True, slots=True)
class EndGroup:
    ends: Tensor
    """(G, ...)"""
    advantages: Tensor
    """(G,)"""
    conditions: Conditions
    shape: tuple[int, int]
    staleness: int

    def picked(self, samples: Sequence[int]) -> "EndGroup":
        these = list(samples)
        ends, advantages = self.ends[these], self.advantages[these]
        return replace(self, ends=ends, advantages=advantages, shape=(len(these), self.shape[1]))

    def with_advantage(self) -> "EndGroup":
        return self.picked([*self.advantages.nonzero().flatten().tolist()])

    def sliced(self, group_slice: GroupSlice) -> "EndGroup":
        samples = slice(group_slice.samples.start, group_slice.samples.stop)
        shape = (len(group_slice.samples), len(group_slice.steps(self.shape[1])))
        ends, advantages = self.ends[samples], self.advantages[samples]
        return replace(self, ends=ends, advantages=advantages, shape=shape)

    def rows(self, chunk: Chunk, device: torch.device) -> Iterator[EndRows]:
        for samples, steps in chunks(self.shape, chunk):
            times = steps.stop - steps.start
            ends = self.ends[samples].repeat_interleave(times, 0).to(device)
            advantage = self.advantages[samples].repeat_interleave(times).to(device)
            yield EndRows(ends, advantage, repeat_rows(self.conditions, len(ends)))


def regress(
    algorithm: Algorithm, rows: EndRows, network: Network, behaviour: Behaviour
) -> LossTerms:
    sigma = torch.full((len(rows.ends),), 0.5)
    velocity = network.velocity(0.5 * rows.ends, sigma, rows.conditions)
    error = ((0.5 * rows.ends - 0.5 * velocity - rows.ends) ** 2).flatten(1).mean(1)
    ones = torch.ones(len(error))
    return LossTerms(Surrogate(rows.advantage.to(error) * error, ones, ones, ones), None)


def _pack(denoising: Denoising, seeds: Sequence[int]) -> bytes:
    return pack({"ends": denoising.latents})


def _ends(stored: bytes) -> Tensor:
    tensors = unpack(stored)
    if tensors.keys() != {"ends"}:
        raise ContractError(f"not the ends of samples: it holds {sorted(tensors)}")
    return tensors["ends"]


def _read(recipe: Recipe, data: GroupData) -> EndGroup:
    parts = [_ends(each) for each in data.trajectories]
    check_alike(parts)
    ends = torch.cat(parts)
    check_size(len(ends), data)
    advantages, conditions = torch.tensor(data.advantages), unpack_conditions(data.conditions)
    shape = (len(ends), recipe.sampling.window)
    return EndGroup(ends, advantages, conditions, shape, data.staleness)


ENDS = RowKind(_pack, lambda recipe, stored: len(_ends(stored)), _read)
