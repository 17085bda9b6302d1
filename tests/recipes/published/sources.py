"""The arithmetic of the published recipes' sources, in float64, from the lines that are cited."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shared.diffusion.training.group import PathGroup
from shared.recipe.recipe import Recipe

SHAPE, CHANNELS = (2, 3), 4
"""Latents are (CHANNELS, *SHAPE)."""


@dataclass(frozen=True)
class Step:
    mean: Tensor
    std: Tensor
    scale: Tensor
    """What the KL's mean square is divided by the square of, twice."""
    log_prob: Callable[[Tensor], Tensor]


StepOf = Callable[[Tensor, Tensor, Tensor, int, float], Step]
"""(velocity, latents (B, ...), sigmas (T+1,), index of the step, noise level)"""


def each(values: Tensor) -> Tensor:
    """Means over everything but the samples."""
    return values.flatten(1).mean(1)


def gaussian(mean: Tensor, std: Tensor) -> Callable[[Tensor], Tensor]:
    normal = torch.distributions.Normal(mean, std)
    return lambda arrived: each(normal.log_prob(arrived))


def flow_step(v: Tensor, x: Tensor, sigmas: Tensor, index: int, level: float) -> Step:
    """yifan123/flow_grpo, sd3_sde_with_logprob.py at 3d02fd9d (zhtmike's copy), lines 43-71; the
    same in Tencent-Hunyuan/MixGRPO d270daf3, fastvideo/utils/sampling_utils.py, flow_grpo_step."""
    s, after = sigmas[index], sigmas[index + 1]
    dt = after - s
    held = sigmas[1] if s == 1 else s
    scale = level * (s / (1 - held)).sqrt()
    towards_noise = x + (1 - s) * v  # what the velocity says the noise is
    mean = x + v * dt + scale**2 / (2 * s) * dt * towards_noise
    std = scale * (-dt).sqrt()
    return Step(mean, std, scale, gaussian(mean, std))


def cps_step(v: Tensor, x: Tensor, sigmas: Tensor, index: int, level: float) -> Step:
    """The same file, lines 73-90 (`sde_type` cps): the log-prob has no constants."""
    s, after = sigmas[index], sigmas[index + 1]
    std = after * math.sin(level * math.pi / 2)
    clean, noise = x - s * v, x + (1 - s) * v
    mean = (1 - after) * clean + (after**2 - std**2).sqrt() * noise
    return Step(mean, std, std, lambda arrived: -each((arrived - mean) ** 2))


def dance_step(v: Tensor, x: Tensor, sigmas: Tensor, index: int, level: float) -> Step:
    """XueZeyue/DanceGRPO at 22b85efe, fastvideo/train_grpo_flux.py, flux_step (the same in its
    copies for Wan and HunyuanVideo): a drift by the score, and noise of one level."""
    s, after = sigmas[index], sigmas[index + 1]
    clean = x - s * v
    score = ((1 - s) * clean - x) / s**2
    mean = x + (after - s) * (v - level**2 / 2 * score)
    scale = torch.tensor(level, dtype=x.dtype)
    std = scale * (s - after).sqrt()
    return Step(mean, std, scale, gaussian(mean, std))


Scores = dict[str, list[list[float]]]
"""Scores of each group's samples, by the type of their scorer."""


def flow_advantages(scores: Scores, over: str) -> Tensor:
    """flow_grpo/stat_tracking.py at 94e23ee5, PerPromptStatTracker.update (type grpo): over the
    population standard deviation of all rewards (`sample.global_std`) or of the prompt's;
    DiffusionNFT has a copy."""
    rewards = torch.tensor(sum_of(scores), dtype=torch.float64)
    std = rewards.std(None if over == "batch" else 1, correction=0, keepdim=True)
    return (rewards - rewards.mean(1, keepdim=True)) / (std + 1e-4)


def dance_advantages(scores: Scores, over: str) -> Tensor:
    """DanceGRPO, train_grpo_flux.py (`use_group`): over the sample standard deviation of the
    prompt's rewards."""
    rewards = torch.tensor(sum_of(scores), dtype=torch.float64)
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-8)


def mix_advantages(scores: Scores, over: str) -> Tensor:
    """MixGRPO at 10293ddd, fastvideo/train_grpo_flux.py (`advantage_aggr`, lines 400-430, and
    764-767): each reward's advantage as DanceGRPO's, added up by weights that are divided by their
    sum."""
    weights = {name: 1.0 for name in scores}
    total = sum(weights.values())
    parts = [weights[n] / total * dance_advantages({n: scores[n]}, over) for n in scores]
    return torch.stack(parts).sum(0)


def sum_of(scores: Scores) -> list[list[float]]:
    columns = list(scores.values())
    return [[sum(of) for of in zip(*groups, strict=True)] for groups in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Source:
    step: StepOf | None
    advantages: Callable[[Scores, str], Tensor]
    drops_zeros: bool
    """Whether samples without advantage leave the batch before its loss (`mask`)."""
    ema: tuple[float, int, int] | None
    """Decay, interval in optimizer steps, and calls at each of them: the loop over micro-batches
    calls `ema.step` after each, by the number of the optimizer steps so far (scripts/train_sd3.py
    at 74db6919, last lines)."""


def micro_batches(groups: int, gpus: int, batch: int, group_size: int) -> int:
    """`train.gradient_accumulation_steps` of config/grpo.py: half of
    `sample.num_batches_per_epoch`."""
    return groups * group_size // (gpus * batch) // 2


SD3 = Source(flow_step, flow_advantages, True, (0.9, 8, micro_batches(48, 32, 9, 24)))
DANCE = Source(dance_step, dance_advantages, False, None)
NFT = Source(None, flow_advantages, False, (0.9, 1, 1))
SOURCES = {
    "flow-grpo.sd35-ocr": SD3,
    "flow-grpo.sd35-pickscore": SD3,
    "flow-grpo.sd35-geneval": SD3,
    "flow-grpo-fast.sd35-pickscore": SD3,
    "cps.sd35-pickscore": replace(
        SD3, step=cps_step, ema=(0.9, 8, micro_batches(64, 32, 9, 18))
    ),
    "grpo-guard.sd35-ocr": replace(SD3, ema=(0.9, 8, micro_batches(48, 16, 9, 24))),
    # scripts/train_flux.py at 74db6919 has no mask.
    "flow-grpo.flux1-dev": replace(
        SD3, drops_zeros=False, ema=(0.9, 8, micro_batches(48, 32, 3, 24))
    ),
    "dance-grpo.flux1-dev": DANCE,
    "dance-grpo.hunyuanvideo": DANCE,
    "dance-grpo.wan2.1-1.3b": DANCE,
    "mix-grpo.flux1-dev": replace(DANCE, step=flow_step, advantages=mix_advantages),
    "diffusion-nft.sd35-pickscore": NFT,
    "diffusion-nft.sd35-ocr": NFT,
}  # fmt: skip


class Linear(nn.Module):
    """The network: a velocity for each element from all channels at its place, and from sigma."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(seed)
        shape = CHANNELS, CHANNELS + 1
        self.weight = nn.Parameter(torch.randn(shape, generator=noise, dtype=torch.float64))

    def forward(self, latents: Tensor, sigma: Tensor) -> Tensor:
        at = sigma.to(latents).reshape(-1, 1, 1, 1).expand(-1, 1, *SHAPE)
        return torch.einsum("oc,bchw->bohw", self.weight, torch.cat([latents, at], 1))


def source_gradient(
    recipe: Recipe, source: Source, groups: Sequence[PathGroup], network: Linear, base: Linear
) -> Tensor:
    """The gradient of the source's loss of a batch: its mean over the trained steps of the samples.

    scripts/train_sd3.py at 74db6919 (the mask, and "grpo logic"), train_flux.py, train_sd3_fast.py;
    for grpo-guard scripts/train_sd3_GRPO_Guard.py at 2e2f712e (zhtmike's copy, `rationorm`);
    fastvideo/train_grpo_flux.py of DanceGRPO (22b85efe) and MixGRPO (10293ddd),
    train_grpo_hunyuan.py: best of n, then the same.
    """
    losses = []
    for group in groups:
        if recipe.algorithm.best_of is not None and group.advantages.any():
            # train_grpo_hunyuan.py: by argsort, half of them the last and half the first
            ascending, half = group.advantages.argsort().tolist(), recipe.algorithm.best_of // 2
            assert sorted(ascending[:half] + ascending[-half:]) == group.samples.tolist()
        for place in range(len(group.step_indices)):
            chosen = torch.zeros(len(group.latents), dtype=torch.bool)
            chosen[group.samples] = (group.trained[group.samples] == place).any(1)
            if source.drops_zeros:
                chosen &= group.advantages != 0
            losses.append(step_losses(recipe, source, group, place, network, base)[chosen])
    [found] = torch.autograd.grad(torch.cat(losses).mean(), [network.weight])
    return found


def step_losses(
    recipe: Recipe,
    source: Source,
    group: PathGroup,
    place: int,
    network: nn.Module,
    base: nn.Module,
) -> Tensor:
    """The source's loss of each sample at one step."""
    assert source.step is not None
    table, level = recipe.algorithm, recipe.sampling.noise_level
    sigmas, index = torch.tensor(group.plan.sigmas).double(), int(group.step_indices[place])
    x, arrived = group.latents[:, place], group.latents[:, place + 1]
    at = sigmas[index].expand(len(x))
    advantage = group.advantages.clamp(-table.advantage_clip, table.advantage_clip)
    now = source.step(network(x, at), x, sigmas, index, level)
    log_ratio = now.log_prob(arrived) - group.log_probs[:, place]
    weight = torch.ones(())
    if table.name == "grpo-guard":
        assert group.means is not None
        drift = each((now.mean - group.means[:, place]) ** 2)
        log_ratio = (log_ratio + drift / (2 * now.std**2)) * now.std
        weight = sigmas[index] - sigmas[index + 1]
    ratio = log_ratio.exp()
    inside = ratio.clamp(1 - table.clip_range, 1 + table.clip_range)
    loss = torch.maximum(-advantage * ratio, -advantage * inside) / weight
    if not table.kl_beta:
        return loss
    with torch.no_grad():
        other = source.step(base(x, at), x, sigmas, index, level)
    apart = each((now.mean - other.mean) ** 2)
    return loss + table.kl_beta * apart / (2 * now.scale**2)
