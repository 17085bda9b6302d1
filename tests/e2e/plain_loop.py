"""A plain loop of diffusers and peft: what a run's update has to be, without its training code.

Of the project it takes seeds, sigmas, the order of prompts, where windows begin, and the scorer.
Which version generates a group is what the commit record says. A batch begins with the stored
weights and moments of its version; updates after its first one go on from the loop's own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from services.reward.scorers.digits import DigitProbability
from shared.learning.prompts import PromptOrder, read_prompts
from shared.learning.seeds import group_seed, sample_seed
from shared.learning.windows import Windows
from shared.messages.contracts import Prompt
from shared.recipe.recipe import Recipe
from shared.recipe.sampling import make_sigmas
from shared.run.commits import CommitRecord, TrainedGroup

Weights = Mapping[str, Tensor]


class Version(NamedTuple):
    """What a run stores of one."""

    record: CommitRecord
    weights: Weights
    """Those that are trained."""
    sampling: Weights
    states: Weights
    """The optimizer's, and others: `<state>/<parameter>`."""


class Trained(NamedTuple):
    weights: Weights
    gradient: Weights
    """Sum of the clipped gradients of a batch's updates, each weighing b1 times the next."""
    norm: float
    """Mean norm of the gradients before they were clipped."""


@dataclass
class Group:
    text: Tensor
    pooled: Tensor
    start: Tensor
    """(1, ...) state before the one stochastic step."""
    index: int
    """Number of that step."""
    arrived: Tensor
    """(G, ...) states after it."""
    log_probs: Tensor
    """(G,) under the version that generated it."""
    advantages: Tensor
    is_fresh: bool


class PlainLoop:
    def __init__(self, recipe: Recipe, versions: Sequence[Version]) -> None:
        from diffusers import StableDiffusion3Pipeline
        from peft import LoraConfig

        torch.set_num_threads(1)
        self.recipe, self.seed = recipe, recipe.run.seed
        self.sigmas = torch.tensor(make_sigmas(recipe.sampling), dtype=torch.float32)
        self.pipeline: Any = StableDiffusion3Pipeline.from_pretrained(recipe.model.folder)
        self.network = self.pipeline.transformer.eval()
        if recipe.model.trained == "lora":
            lora = recipe.model.lora
            self.network.requires_grad_(False).add_adapter(LoraConfig(
                r=lora.rank, lora_alpha=lora.alpha,
                target_modules=sorted({n.rsplit(".lora_", 1)[0] for n in versions[0].weights}),
            ))  # fmt: skip
        self.weights = {
            name.replace(".default.", "."): each
            for name, each in self.network.named_parameters() if each.requires_grad
        }  # fmt: skip
        assert self.weights.keys() == versions[0].weights.keys()
        table = recipe.trainer
        self.optimizer = torch.optim.AdamW(
            self.weights.values(), lr=table.learning_rate, betas=table.betas,
            weight_decay=table.weight_decay,
        )  # fmt: skip
        self.versions = versions
        self.prompts = PromptOrder(read_prompts(recipe.data.prompts), self.seed)
        folder = recipe.reward.scorers[0].folder
        assert folder is not None
        self.scorer = DigitProbability(folder)
        low, high = recipe.sampling.first_window_starts
        self.windows = Windows(first=low, last=high)

    def train(self, batch: int) -> Trained:
        """Train a batch again."""
        groups = [self.generate(batch, each) for each in self.versions[batch + 1].record.trained]
        table, size = self.recipe.trainer, len(groups) // self.recipe.trainer.updates
        self.begin(batch)
        gradient = {name: torch.zeros_like(each).double() for name, each in self.weights.items()}
        norms = []
        for update in range(table.updates):
            self.optimizer.zero_grad()
            self.backward(batch, groups[update * size : (update + 1) * size], update)
            norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), table.max_grad_norm)
            norms.append(float(norm))
            for name, each in self.weights.items():
                assert each.grad is not None
                gradient[name].mul_(table.betas[0]).add_(each.grad)
            self.optimizer.step()
        made = {name: each.detach().clone() for name, each in self.weights.items()}
        return Trained(made, gradient, math.fsum(norms) / len(norms))

    def begin(self, batch: int) -> None:
        """Go back to what is stored of the batch's version."""
        self.use(self.versions[batch].weights)
        self.optimizer.state.clear()
        for name, each in self.weights.items() if batch else ():
            self.optimizer.state[each] = {
                key: self.versions[batch].states[f"{key}/{name}"].clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
        self.set_learning_rate(batch)

    def backward(self, batch: int, groups: Sequence[Any], update: int) -> None:
        """Add up the gradient of an update."""
        proximal = [self.log_prob_by(each, self.versions[batch].weights) for each in groups]
        for group, log_prob in zip(groups, proximal, strict=True):
            loss = self.loss(group, log_prob, is_first=update == 0)
            (loss.sum() / (len(groups) * len(loss))).backward()

    def set_learning_rate(self, batch: int) -> None:
        table = self.recipe.trainer
        assert table.decay_steps is not None
        progress = batch / table.decay_steps
        for each in self.optimizer.param_groups:
            each["lr"] = table.learning_rate * (1 + math.cos(math.pi * progress)) / 2

    def encoded(self, batch: int, group: int) -> tuple[Prompt, Tensor, Tensor]:
        """Return the prompt of a group, and what the text encoders make of it."""
        prompt = self.prompts.of_group(batch, group, self.recipe.batch.groups)
        text, _, pooled, _ = self.pipeline.encode_prompt(
            prompt.text, prompt.text, prompt.text, do_classifier_free_guidance=False,
            max_sequence_length=self.pipeline.tokenizer_3.model_max_length,
        )  # fmt: skip
        return prompt, text, pooled

    @torch.no_grad()
    def generate(self, batch: int, committed: TrainedGroup) -> Any:
        number, version = committed.group, committed.policy_version
        self.use(self.versions[version].sampling)
        size = self.recipe.batch.group_size
        prompt, text, pooled = self.encoded(batch, number)
        shape = self.network.config.in_channels, *(self.network.config.sample_size,) * 2
        generators = [
            torch.Generator().manual_seed(sample_seed(self.seed, batch, number, each))
            for each in range(size)
        ]
        for each in generators:
            torch.randn(shape, generator=each)  # of a start that the group shares instead
        shared = torch.Generator().manual_seed(group_seed(self.seed, batch, number))
        x = torch.randn(shape, generator=shared)[None]
        index = self.windows.start(self.seed, batch, number)
        for step in range(len(self.sigmas) - 1):
            v = self.velocity(x, step, text, pooled)
            if step == index:
                start, (mean, std, _) = x, self.gaussian(x, v, step)
                noise = torch.stack([torch.randn(shape, generator=each) for each in generators])
                x = arrived = mean + std * noise
                log_probs = self.log_prob(arrived, mean, std)
            else:
                x = x + (self.sigmas[step + 1] - self.sigmas[step]) * v
        advantages = self.advantages(x, prompt.metadata, committed)
        return Group(text, pooled, start, index, arrived, log_probs, advantages, version == batch)

    def advantages(self, x: Tensor, metadata: Any, committed: TrainedGroup) -> Tensor:
        """(G,) of finished samples"""
        vae = self.pipeline.vae
        pixels = vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor).sample
        images = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).numpy()
        rewards = torch.tensor(self.scorer.score(images, [metadata] * len(x)), dtype=torch.float64)
        # A pixel on the border of two bytes may be rounded the other way: then it is the recorded
        # reward that was trained on.
        recorded = torch.tensor(committed.rewards, dtype=torch.float64)
        assert torch.allclose(rewards, recorded, rtol=0, atol=0.01)
        return (recorded - recorded.mean()) / (recorded.std(correction=0) + 1e-4)

    def loss(self, group: Group, proximal: Tensor, *, is_first: bool) -> Tensor:
        """(G,)"""
        table = self.recipe.algorithm
        v = self.velocity(group.start, group.index, group.text, group.pooled)
        mean, std, g = self.gaussian(group.start, v, group.index)
        log_prob = self.log_prob(group.arrived, mean, std)
        weight, old = torch.ones(()), group.log_probs
        if is_first and group.is_fresh:
            old = log_prob.detach()
        elif table.stale_loss == "decoupled":
            weight = torch.exp(proximal - old).clamp(max=1 + table.weight_cap * table.clip_range)
            old = proximal
        ratio = torch.exp(log_prob - old)
        clipped = ratio.clamp(1 - table.clip_range, 1 + table.clip_range)
        a = group.advantages.clamp(-table.advantage_clip, table.advantage_clip)
        surrogate = -weight * torch.minimum(ratio * a, clipped * a)
        if not table.kl_beta:
            return surrogate
        with torch.no_grad():
            self.network.disable_adapters()
            v = self.velocity(group.start, group.index, group.text, group.pooled)
            base, _, _ = self.gaussian(group.start, v, group.index)
            self.network.enable_adapters()
        return surrogate + table.kl_beta * ((mean - base) ** 2).mean() / (2 * g**2)

    @torch.no_grad()
    def log_prob_by(self, group: Group, weights: Weights) -> Tensor:
        now = {name: each.detach().clone() for name, each in self.weights.items()}
        self.use(weights)
        v = self.velocity(group.start, group.index, group.text, group.pooled)
        mean, std, _ = self.gaussian(group.start, v, group.index)
        self.use(now)
        return self.log_prob(group.arrived, mean, std)

    @torch.no_grad()
    def use(self, weights: Weights) -> None:
        for name, each in self.weights.items():
            each.copy_(weights[name])

    def velocity(self, x: Tensor, step: int, text: Tensor, pooled: Tensor) -> Tensor:
        found: Tensor = self.network(
            x, text.expand(len(x), -1, -1), pooled.expand(len(x), -1),
            (1000 * self.sigmas[step]).expand(len(x)), return_dict=False,
        )[0]  # fmt: skip
        return found

    def gaussian(self, x: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, standard deviation and noise scale of Flow-GRPO's step."""
        s, after = self.sigmas[step], self.sigmas[step + 1]
        below_one = torch.minimum(s, self.sigmas[1])
        g, dt = self.recipe.sampling.noise_level * torch.sqrt(s / (1 - below_one)), after - s
        drift = g**2 / (2 * s)
        return x * (1 + drift * dt) + v * dt * (1 + drift * (1 - s)), g * torch.sqrt(-dt), g

    def log_prob(self, arrived: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        squares = ((arrived - mean) ** 2).flatten(1).mean(1)
        return -squares / (2 * std**2) - torch.log(std) - math.log(2 * math.pi) / 2
