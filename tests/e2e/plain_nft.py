"""The plain loop of DiffusionNFT: an old policy samples, follows the trained one, and holds it
near."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.learning.algorithms import old_policy_decay
from shared.learning.seeds import derive, permutation, sample_seed
from shared.run.commits import TrainedGroup
from tests.e2e.plain_loop import PlainLoop, Weights


@dataclass
class Finished:
    text: Tensor
    pooled: Tensor
    clean: Tensor
    """(K G, ...) samples, each at K sigmas of its own."""
    noised: Tensor
    indices: Tensor
    """(K G,) numbers of the sigmas."""
    advantages: Tensor
    """(K G,)"""


class PlainNft(PlainLoop):
    def backward(self, batch: int, groups: Sequence[Finished], update: int) -> None:
        for group in groups:
            (self.nft_loss(group, self.versions[batch].sampling).mean() / len(groups)).backward()

    def followed(self, batch: int, made: Weights) -> Weights:
        """Return what samples next, if the batch makes these weights."""
        old, done = self.versions[batch].sampling, (batch + 1) * self.recipe.trainer.updates
        decay = old_policy_decay(self.recipe.algorithm.nft_decay, done)
        return {n: decay * old[n] + (1 - decay) * each for n, each in made.items()}

    @torch.no_grad()
    def generate(self, batch: int, committed: TrainedGroup) -> Finished:
        number, size = committed.group, self.recipe.batch.group_size
        self.use(self.versions[committed.policy_version].sampling)
        prompt, text, pooled = self.encoded(batch, number)
        shape = self.network.config.in_channels, *(self.network.config.sample_size,) * 2
        seeds = [sample_seed(self.seed, batch, number, each) for each in range(size)]
        x = torch.stack([
            torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds
        ])  # fmt: skip
        steps, count = len(self.sigmas) - 1, self.recipe.sampling.window
        for step in range(steps):
            v = self.velocity(x, step, text, pooled)
            x = x + (self.sigmas[step + 1] - self.sigmas[step]) * v
        drawn = [permutation(seed, steps, "nft")[:count] for seed in seeds]
        noise = torch.stack([
            torch.randn(shape, generator=torch.Generator().manual_seed(derive(seed, "nft", index)))
            for seed, indices in zip(seeds, drawn, strict=True) for index in indices
        ])  # fmt: skip
        indices, clean = torch.tensor(drawn).flatten(), x.repeat_interleave(count, 0)
        s = self.sigmas[indices].reshape(-1, 1, 1, 1)
        advantages = self.advantages(x, prompt.metadata, committed).repeat_interleave(count)
        return Finished(text, pooled, clean, (1 - s) * clean + s * noise, indices, advantages)

    def nft_loss(self, group: Finished, old: Weights) -> Tensor:
        """(K G,)"""
        table = self.recipe.algorithm
        with torch.no_grad():
            now = {name: each.detach().clone() for name, each in self.weights.items()}
            self.use(old)
            v_old = self.at(group)
            self.use(now)
            self.network.disable_adapters()
            base = self.at(group)
            self.network.enable_adapters()
        v, beta, clip = self.at(group), table.nft_beta, table.advantage_clip
        s = self.sigmas[group.indices].reshape(-1, 1, 1, 1)

        def branch(velocity: Tensor) -> Tensor:
            error = group.noised - s * velocity - group.clean
            distance = error.detach().double().abs().flatten(1).mean(1).clamp(min=1e-5)
            return (error**2).flatten(1).mean(1) / distance

        p = group.advantages.clamp(-clip, clip) / (2 * clip) + 0.5
        towards = branch(beta * v + (1 - beta) * v_old)
        away = branch((1 + beta) * v_old - beta * v)
        kl = ((v - base) ** 2).flatten(1).mean(1)
        return clip * (p * towards + (1 - p) * away) / beta + table.kl_beta * kl

    def at(self, group: Finished) -> Tensor:
        rows = len(group.noised)
        found: Tensor = self.network(
            group.noised, group.text.expand(rows, -1, -1), group.pooled.expand(rows, -1),
            1000 * self.sigmas[group.indices], return_dict=False,
        )[0]  # fmt: skip
        return found
