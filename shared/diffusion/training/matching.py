"""Objectives that compare the network with the straight line from a finished sample to noise.

Samples are finished by ODE, as for DiffusionNFT (`forward_process`): no path and no log-prob is
stored. A sample x0 gets new noise, x_s = (1 - s) x0 + s noise, at sigmas of the sampling schedule;
the target is the network's output in pretraining, noise - x0.

AWM, advantage weighted matching (Xue et al. 2025, arXiv 2509.25050), takes the error as the
log-prob of a policy gradient, log p = -w(e, s):

    e = mean (v - (noise - x0))^2,       w = e  or  s e  or  4 s ((e + 1e-10)^(1/4) -
        (1e-10)^(1/4))
    loss = -(A / c) p / sg(p),     gradient = (A / c) dw,     A clipped to +-c = advantage_clip

The ratio to the policy that the batch is trained from is 1 by construction, so no clip acts.

Online DPO (Wallace et al. 2023, arXiv 2311.12908, on pairs of the group's own samples): of each
group the best sample (w) and the worst (l), at the same sigmas and with the same noise,

    z = -(beta / 2) ((e_w - e_w of the base) - (e_l - e_l of the base)),      loss = -log
        sigmoid(z)

A group whose rewards are all equal has no pair. The loss does not depend on how far apart they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softplus

from shared.devices.chunks import Chunk
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.diffusion.families.base import at_least_float32
from shared.diffusion.loading.device import to_device
from shared.diffusion.loading.models import Conditions
from shared.diffusion.training.forward_process import (
    FINISHED,
    FinishedGroup,
    NoisedSamples,
    read_finished,
)
from shared.diffusion.training.loss import Surrogate, onpolicy_surrogate
from shared.diffusion.training.objective import Behaviour, LossTerms, Network
from shared.diffusion.training.rows import RowKind, chunks
from shared.learning.seeds import derive
from shared.recipe.recipe import Recipe
from shared.recipe.sampling import Algorithm, MatchingWeight

MIN_ERROR = 1e-10
POWER = 0.25


def awm(
    algorithm: Algorithm, rows: NoisedSamples, network: Network, behaviour: Behaviour
) -> LossTerms:
    """Returns the loss of AWM. A stale sample is trained as any other: it is data."""
    velocity = at_least_float32(network.velocity(rows.noised, rows.sigma, rows.conditions))
    weighted = weigh(matching_error(velocity, rows), rows.sigma, algorithm.awm_weight)
    clip = algorithm.advantage_clip
    surrogate = onpolicy_surrogate(
        -weighted,
        -weighted.detach(),
        rows.advantage.to(velocity) / clip,
        clip_range=algorithm.clip_range,
        advantage_clip=1.0,
    )
    if not algorithm.kl_beta:
        return LossTerms(surrogate, None)
    reference = network.reference_velocity(rows.noised, rows.sigma, rows.conditions)
    return LossTerms(surrogate, _mean_square(velocity - reference))


def matching_error(velocity: Tensor, rows: NoisedSamples) -> Tensor:
    """Returns (B,), the mean square of what velocities (B, ...) are off the straight line."""
    sigma = rows.sigma.to(velocity).reshape(-1, *([1] * (velocity.dim() - 1)))
    target = (rows.noised.to(velocity) - rows.clean.to(velocity)) / sigma
    return _mean_square(velocity - target)


def weigh(error: Tensor, sigma: Tensor, weight: MatchingWeight) -> Tensor:
    """Returns w(e, s) (B,) from errors and sigmas (B,)."""
    match weight:
        case "uniform":
            return error
        case "sigma":
            return sigma.to(error) * error
        case "ghuber":
            root: Tensor = (error + MIN_ERROR) ** POWER - MIN_ERROR**POWER
            return sigma.to(error) * root / POWER


def dpo(
    algorithm: Algorithm, rows: NoisedSamples, network: Network, behaviour: Behaviour
) -> LossTerms:
    """Returns the loss of DPO on pairs of a group's samples. None of it is in proportion to the
    advantages."""
    velocity = at_least_float32(network.velocity(rows.noised, rows.sigma, rows.conditions))
    reference = network.reference_velocity(rows.noised, rows.sigma, rows.conditions)
    gained = matching_error(velocity, rows) - matching_error(reference.to(velocity), rows)
    best, worst = gained.chunk(2)
    differ = (rows.advantage > 0).to(gained)
    loss = differ * softplus(algorithm.dpo_beta / 2 * (best - worst))
    none, ones = torch.zeros_like(loss.detach()), torch.ones_like(loss.detach())
    surrogate = Surrogate(none, ones, ones, ones)
    if not algorithm.kl_beta:
        return LossTerms(surrogate, None, loss)
    moved = torch.stack(_mean_square(velocity - reference).chunk(2)).mean(0)
    return LossTerms(surrogate, moved, loss)


def _mean_square(values: Tensor) -> Tensor:
    return (values**2).flatten(1).mean(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairGroup:
    """Holds the best and the worst sample of a group, which are trained together at K sigmas."""

    samples: Tensor
    """(2, ...) latents without noise: the best, then the worst."""
    seed: int
    """Seed of the noise, which both share."""
    indices: Tensor
    """(K,) indices of sigmas."""
    sigmas: Tensor
    """(T+1,) float32, the schedule."""
    margin: float
    """Difference between the advantages of the best and the worst; 0 if there is no pair."""
    conditions: Conditions
    staleness: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        return 1, len(self.indices)

    def picked(self, samples: Sequence[int]) -> "PairGroup":
        assert list(samples) == [0], "the recipe has been checked"
        return self

    def with_advantage(self) -> "PairGroup":
        return self

    def sliced(self, group_slice: GroupSlice) -> "PairGroup":
        steps = group_slice.steps(len(self.indices))
        return replace(self, indices=self.indices[steps.start : steps.stop])

    def rows(self, chunk: Chunk, device: torch.device) -> Iterator[NoisedSamples]:
        conditions = {name: to_device(each, device) for name, each in self.conditions.items()}
        for _, steps in chunks(self.shape, chunk):
            indices = self.indices[steps]
            noise = torch.stack([self._noise(index) for index in indices.tolist()])
            sigma = self.sigmas[indices].repeat(2)
            clean = self.samples.repeat_interleave(len(indices), 0)
            margins = torch.full((len(indices),), self.margin, dtype=torch.float64)
            noises = torch.cat([noise, noise])
            yield NoisedSamples.mixed(clean, noises, sigma, margins, conditions, device)

    def _noise(self, index: int) -> Tensor:
        """Draws noise (...), the same for a sigma however the group is cut."""
        generator = torch.Generator().manual_seed(derive(self.seed, "dpo", index))
        return torch.randn(self.samples.shape[1:], generator=generator)


def read_pair(recipe: Recipe, data: GroupData) -> PairGroup:
    """Reads the pair of a group from its stored fragments.

    Raises:
        ContractError: if the fragments do not make up a group of this run.
    """
    return extreme_pair(read_finished(recipe, data))


def extreme_pair(group: FinishedGroup) -> PairGroup:
    """Returns the pair of samples with the highest and the lowest advantage; of equal ones the
    first. Both are noised as the group's first sample would be."""
    best, worst = int(group.advantages.argmax()), int(group.advantages.argmin())
    return PairGroup(
        samples=group.samples[[best, worst]],
        seed=group.seeds[0],
        indices=group.indices[0],
        sigmas=group.sigmas,
        margin=float(group.advantages[best] - group.advantages[worst]),
        conditions=group.conditions,
        staleness=group.staleness,
    )


PAIRS = RowKind(FINISHED.pack, FINISHED.count, read_pair)
