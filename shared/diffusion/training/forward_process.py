"""DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117): training on finished samples with new noise.

No denoising path is stored and no log-prob is needed, so samples may come from any sampler; here it
is the ODE. A sample x0 is mixed with fresh noise, x_s = (1 - s) x0 + s noise, at sigmas of the
sampling schedule. The loss has two branches, which combine the network's velocity v with the old
policy's v_old. A good sample has more weight in the branch v+, a bad sample in the branch v-:

    v+ = b v + (1 - b) v_old        v- = (1 + b) v_old - b v        x0(v) = x_s - s v
    L = mean |x0(v) - x0|^2 / max(mean |x0(v) - x0|, 1e-5) of a branch, divisor without gradient
    loss = c (p L+ + (1 - p) L-) / b = A (L+ - L-) / 2b + c (L+ + L-) / 2b
    p = 1/2 + A / 2c,   A clipped to +-c

The old policy is a moving average of the trained policy (`old_policy_decay`), and generates the
samples. The second term of the loss keeps the trained policy near the old policy. If both policies
are equal, the second term has no gradient, b cancels out of the first term, and v_old needs no
separate pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.diffusion.loading.device import to_device
from shared.diffusion.loading.models import Conditions, repeat_rows
from shared.diffusion.policy import sampling_plan
from shared.diffusion.sampling.sampler import Denoising
from shared.diffusion.sampling.tensors import check_latents, pack, unpack, unpack_conditions
from shared.diffusion.training.loss import Surrogate
from shared.diffusion.training.rows import RowKind, check_alike, check_size, chunks
from shared.errors import ContractError
from shared.learning.seeds import derive, permutation
from shared.recipe.recipe import Recipe

MIN_DISTANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """Holds G samples. Each sample is trained at K sigmas, which differ between samples."""

    samples: Tensor
    """(G, ...) latents without noise."""
    seeds: tuple[int, ...]
    """G seeds, which determine noise and sigmas."""
    indices: Tensor
    """(G, K) indices of sigmas, different ones for each sample."""
    sigmas: Tensor
    """(T+1,) float32, the schedule."""
    advantages: Tensor
    """(G,)"""
    conditions: Conditions
    staleness: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        samples, steps = self.indices.shape
        return samples, steps

    def picked(self, samples: Sequence[int]) -> "FinishedGroup":
        indices = list(samples)
        return replace(
            self,
            samples=self.samples[indices],
            seeds=tuple(self.seeds[sample] for sample in indices),
            indices=self.indices[indices],
            advantages=self.advantages[indices],
        )

    def with_advantage(self) -> "FinishedGroup":
        return self.picked(self.advantages.nonzero().flatten().tolist())

    def sliced(self, group_slice: GroupSlice) -> "FinishedGroup":
        samples = slice(group_slice.samples.start, group_slice.samples.stop)
        steps = group_slice.steps(self.shape[1])
        return replace(
            self,
            samples=self.samples[samples],
            seeds=self.seeds[samples],
            indices=self.indices[samples, steps.start : steps.stop],
            advantages=self.advantages[samples],
        )

    def rows(self, chunk: Chunk, device: torch.device) -> "Iterator[NoisedSamples]":
        conditions = {name: to_device(each, device) for name, each in self.conditions.items()}
        for samples, steps in chunks(self.shape, chunk):
            indices = self.indices[samples, steps]
            noise = torch.stack([
                self._noise(seed, index)
                for seed, row in zip(self.seeds[samples], indices.tolist(), strict=True)
                for index in row
            ])  # fmt: skip
            num_steps = indices.shape[1]
            clean = self.samples[samples].repeat_interleave(num_steps, 0)
            sigma = self.sigmas[indices.flatten()]
            advantage = self.advantages[samples].repeat_interleave(num_steps)
            yield NoisedSamples.mixed(clean, noise, sigma, advantage, conditions, device)

    def _noise(self, seed: int, index: int) -> Tensor:
        """Draws noise (...), which does not depend on the division of the group into slices."""
        generator = torch.Generator().manual_seed(derive(seed, "nft", index))
        return torch.randn(self.samples.shape[1:], generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisedSamples:
    """Holds B rows. With pairs, the better samples of all pairs come first, then the worse ones."""

    noised: Tensor
    """(B, ...)"""
    sigma: Tensor
    """(B,)"""
    clean: Tensor
    """(B, ...) samples without noise."""
    advantage: Tensor
    """(B,), or (B / 2,) margins of pairs."""
    conditions: Conditions
    """Conditioning of B rows."""

    @classmethod
    def mixed(
        cls, clean: Tensor, noise: Tensor, sigma: Tensor, advantage: Tensor,
        conditions: Conditions, device: torch.device,
    ) -> Self:  # fmt: skip
        """Mix clean samples (B, ...) with noise (B, ...) at sigma (B,); return rows on the device.

        The conditions (1, ...) are the same for all rows, and are already on the device."""
        s = sigma.reshape(-1, *([1] * (clean.dim() - 1)))
        return cls(
            noised=to_device((1 - s) * clean + s * noise, device),
            sigma=to_device(sigma, device),
            clean=to_device(clean, device),
            advantage=to_device(advantage, device),
            conditions=repeat_rows(conditions, len(clean)),
        )


@dataclass(frozen=True, slots=True)
class LossParts:
    """The terms of the loss per row."""

    surrogate: Surrogate
    """Term in proportion to the advantage, with a ratio of 1."""
    constant: Tensor
    """(B,), term without the advantage."""


def branches(
    velocity: Tensor, old: Tensor, rows: NoisedSamples, *, beta: float, advantage_clip: float
) -> LossParts:
    """Return the loss of each row from velocities (B, ...) of the trained and the old policy, by
    the formulas of the module."""
    velocity = velocity.to(torch.promote_types(velocity.dtype, torch.float32))
    old = old.detach().to(velocity)
    advantage = rows.advantage.to(velocity).clamp(-advantage_clip, advantage_clip)
    good = _branch(beta * velocity + (1 - beta) * old, rows)
    bad = _branch((1 + beta) * old - beta * velocity, rows)
    per_row = advantage * (good - bad) / (2 * beta)
    ones = torch.ones_like(per_row.detach())
    constant = advantage_clip * (good + bad) / (2 * beta)
    return LossParts(Surrogate(per_row, ones, ones, ones), constant)


def _branch(velocity: Tensor, rows: NoisedSamples) -> Tensor:
    sigma = rows.sigma.to(velocity).reshape(-1, *([1] * (velocity.dim() - 1)))
    error = rows.noised.to(velocity) - sigma * velocity - rows.clean.to(velocity)
    distance = error.detach().double().abs().flatten(1).mean(1).clamp(min=MIN_DISTANCE)
    return (error**2).flatten(1).mean(1) / distance.to(velocity)


def pack_finished(denoising: Denoising, seeds: Sequence[int]) -> bytes:
    """Packs finished samples (B, ...) and their seeds for the store."""
    check_latents("samples", denoising.latents)
    return pack({"samples": denoising.latents, "seeds": torch.tensor(seeds)})


def unpack_finished(data: bytes) -> tuple[Tensor, list[int]]:
    """Read finished samples (n, ...) and their n seeds; raises ContractError if they are
    invalid."""
    tensors = unpack(data)
    if tensors.keys() != {"samples", "seeds"}:
        raise ContractError(f"not finished samples: it holds {sorted(tensors)[:8]}")
    samples, seeds = tensors["samples"], tensors["seeds"]
    if seeds.dim() != 1 or seeds.is_floating_point() or seeds.shape != samples.shape[:1]:
        raise ContractError("not finished samples: a sample has no seed of its own")
    if samples.dim() < 3 or not samples.numel() or not samples.is_floating_point():
        raise ContractError(f"not finished samples: of shape {list(samples.shape)}")
    check_latents("samples", samples)
    return samples, [int(seed) for seed in seeds]


def read_finished(recipe: Recipe, data: GroupData) -> FinishedGroup:
    """Reads a group from its stored fragments.

    Raises:
        ContractError: if the fragments do not make up a group of this run.
    """
    parts = [unpack_finished(each) for each in data.trajectories]
    check_alike([part for part, _ in parts])
    samples = torch.cat([part for part, _ in parts])
    seeds = [seed for _, part in parts for seed in part]
    check_size(len(samples), data)
    sigmas = torch.tensor(sampling_plan(recipe, window_start=None).sigmas)
    steps, window = len(sigmas) - 1, recipe.sampling.window
    return FinishedGroup(
        samples=samples,
        seeds=tuple(seeds),
        indices=torch.tensor([permutation(seed, steps, "nft")[:window] for seed in seeds]),
        sigmas=sigmas,
        advantages=torch.tensor(data.advantages, dtype=torch.float64),
        conditions=unpack_conditions(data.conditions),
        staleness=data.staleness,
    )


FINISHED = RowKind(
    pack_finished, lambda recipe, stored: len(unpack_finished(stored)[0]), read_finished
)
