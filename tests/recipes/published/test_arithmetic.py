"""What the sources of the published recipes do with their settings, against what ours do.

Each source's step, advantages and loss are written here in float64 from the lines that are cited.
On random tensors ours agree to 1e-6, or the recipe's header names the difference (`DIFFERS`).
"""

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from shared.devices.chunks import Chunk
from shared.diffusion.loading.models import Conditions
from shared.diffusion.policy import sampling_plan
from shared.diffusion.sampling.transition import transition
from shared.diffusion.training.forward_process import FinishedGroup
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.group import PathGroup
from shared.diffusion.weights.weight_sets import WeightSets
from shared.learning.advantages import best_and_worst
from shared.learning.algorithms import old_policy_decay
from shared.recipe.recipe import Recipe, load_recipe
from tests.paths import RECIPES
from tests.recipes.published.sources import (
    CHANNELS,
    SHAPE,
    SOURCES,
    Linear,
    Scores,
    Source,
    each,
    source_gradient,
    sum_of,
)

FOLDER = RECIPES / "published"
TOLERANCE = 1e-6
GROUPS = 3
"""Groups of the test's batch, whose last one is saturated."""


PATHS = sorted(name for name, source in SOURCES.items() if source.step)
DIFFERS = {"advantages": "algorithm.advantage_std"}
"""What may differ, and the name by which a header has to say it."""


def header(name: str) -> str:
    lines = (FOLDER / f"{name}.toml").read_text().split("\n\n")[0].split("\n")
    return " ".join(line.removeprefix("# ") for line in lines)


@cache
def recipe_of(name: str) -> Recipe:
    sigmas: dict[str, object] = {}
    if name == "flow-grpo.flux1-dev":  # its own are those of a model that is not here
        own = flux_sigmas(steps=6, tokens=(512 // 16) ** 2)
        sigmas = {"sampling.sigmas": own, "evaluation.sigmas": "model"}
    return load_recipe(FOLDER / f"{name}.toml", sigmas)


def flux_sigmas(steps: int, tokens: int) -> tuple[float, ...]:
    """flux_pipeline_with_logprob.py at 814021a2 (zhtmike's copy), calculate_shift and the denoising
    loop."""
    per_token = (1.15 - 0.5) / (4096 - 256)
    shift = math.exp(0.5 + per_token * (tokens - 256))
    linear = [1 - step / steps for step in range(steps)]
    return (*(shift / (shift + (1 / t - 1)) for t in linear), 0.0)


def agree(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max().clamp(min=1e-12))


class Model:
    """What a gradient needs of a model."""

    def __init__(self, network: nn.Module) -> None:
        self.transformer = network

    def velocity(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, *, guidance: float
    ) -> Tensor:
        found: Tensor = self.transformer(latents, sigma)
        return found


def rewards_of(recipe: Recipe, seed: int = 5) -> Scores:
    """Random scores; all samples of the last group have the same."""
    noise = torch.Generator().manual_seed(seed)
    size = recipe.batch.group_size
    types = [scorer.name for scorer in recipe.reward.scorers]
    found = {name: torch.rand(GROUPS, size, generator=noise).double() for name in types}
    for scores in found.values():
        scores[-1] = 0.25
    return {name: scores.tolist() for name, scores in found.items()}


def advantages_of(recipe: Recipe, scores: Scores) -> Tensor:
    """Ours, as the trainer has them in the end."""
    rewards = sum_of(scores)
    parts = [{name: scores[name][group] for name in scores} for group in range(GROUPS)]
    if recipe.algorithm.advantage_std == "batch":
        of_all = recipe.advantages.for_batch(list(zip(rewards, parts, strict=True)))
        return torch.tensor(of_all, dtype=torch.float64)
    of_each = [recipe.advantages.for_group(*scored) for scored in zip(rewards, parts, strict=True)]
    return torch.tensor(of_each, dtype=torch.float64)


def test_every_published_recipe_has_its_source_here() -> None:
    assert SOURCES.keys() == {path.stem for path in FOLDER.glob("*.toml")}


@pytest.mark.parametrize("name", PATHS)
def test_a_step_is_that_of_the_source(name: str) -> None:
    recipe, source = recipe_of(name), SOURCES[name]
    assert source.step is not None
    plan = sampling_plan(recipe, window_start=0)
    sigmas = torch.tensor(plan.sigmas).double()
    v, x, noise = torch.randn(3, 2, CHANNELS, *SHAPE, dtype=torch.float64)
    for index in range(len(sigmas) - 2):
        wanted = source.step(v, x, sigmas, index, recipe.sampling.noise_level)
        step = plan.step(torch.tensor([index, index]))
        found = transition(v, x, step, noise=noise)
        assert agree(found.mean, wanted.mean), index
        assert agree(found.latents, wanted.mean + wanted.std * noise), index
        assert agree(found.log_prob, wanted.log_prob(found.latents)), index
        assert agree(found.noise_scale * found.sqrt_neg_dt, wanted.std.expand(2)), index


@pytest.mark.parametrize("name", SOURCES)
def test_advantages_are_those_of_the_source_or_the_header_names_the_difference(name: str) -> None:
    recipe, source = recipe_of(name), SOURCES[name]
    scores = rewards_of(recipe)
    found = advantages_of(recipe, scores)
    wanted = source.advantages(scores, recipe.algorithm.advantage_std)
    assert not found[-1].any(), "a saturated group has none"
    named = f"`{DIFFERS['advantages']}`" in header(name)
    assert agree(found, wanted) != named
    if not named:
        return
    size = recipe.batch.group_size
    larger = math.sqrt(size / (size - 1)) - 1
    assert f"advantages {100 * larger:.1f} % larger" in header(name)
    parts = {n: torch.tensor(scores[n], dtype=torch.float64) for n in scores}
    by_ours = [  # the source's, with our standard deviation
        (values - values.mean(1, keepdim=True)) / (values.std(1, correction=0, keepdim=True) + 1e-4)
        for values in parts.values()
    ]
    assert agree(found, torch.stack(by_ours).sum(0) / len(by_ours)), "and in nothing else"


def test_three_rewards_are_averaged_and_not_summed() -> None:
    """Where they agree, a sample's advantage is that of each of them, and the clip at 5 has
    something to do at 5."""
    recipe = recipe_of("mix-grpo.flux1-dev")
    values = rewards_of(recipe)["hps"]
    alike = {scorer.name: values for scorer in recipe.reward.scorers}
    assert len(alike) == 3
    alone = recipe.model_copy(update={"reward": recipe.reward.model_copy(update={
        "scorers": recipe.reward.scorers[:1]
    })})  # fmt: skip
    wanted = advantages_of(alone, {"hps": values})
    assert agree(advantages_of(recipe, alike), wanted)


def paths(
    recipe: Recipe, source: Source, network: Linear, advantages: Tensor, moved: float
) -> list[PathGroup]:
    """Groups whose samples the source has made with the network, and stored log-probs that are
    ``moved`` from those of the network by as much at random."""
    assert source.step is not None
    noise = torch.Generator().manual_seed(11)
    plan = sampling_plan(recipe, window_start=recipe.sampling.first_window_starts[1])
    sigmas, steps = torch.tensor(plan.sigmas).double(), list(plan.window)
    size, count = recipe.batch.group_size, recipe.sampling.window
    groups = []
    for group in range(GROUPS):
        latents = [torch.randn(size, CHANNELS, *SHAPE, generator=noise, dtype=torch.float64)]
        log_probs, means = [], []
        for index in steps:
            with torch.no_grad():
                v = network(latents[-1], sigmas[index].expand(size))
            taken = source.step(v, latents[-1], sigmas, index, recipe.sampling.noise_level)
            drawn = torch.randn(latents[-1].shape, generator=noise, dtype=torch.float64)
            latents.append(taken.mean + taken.std * drawn)
            log_probs.append(taken.log_prob(latents[-1]))
            means.append(taken.mean + moved * drawn * taken.std)
        stored = torch.stack(log_probs, 1)
        stored += moved * torch.randn(stored.shape, generator=noise, dtype=torch.float64)
        trained = torch.stack([
            torch.randperm(len(steps), generator=noise)[:count].sort().values for _ in range(size)
        ])  # fmt: skip
        chosen = torch.arange(size)
        if recipe.algorithm.best_of is not None:
            chosen = torch.tensor(
                best_and_worst(advantages[group].tolist(), recipe.algorithm.best_of)
            )
        groups.append(PathGroup(
            latents=torch.stack(latents, 1), starts=None, start_of=None, log_probs=stored,
            means=torch.stack(means, 1) if plan.keeps_means else None,
            step_indices=torch.tensor(steps), trained=trained, advantages=advantages[group],
            conditions={}, plan=plan, samples=chosen, steps=range(count),
            staleness=int(moved > 0),
        ))  # fmt: skip
    return groups


@pytest.mark.parametrize("moves", [False, True], ids=["fresh", "moved"])
@pytest.mark.parametrize("name", PATHS)
def test_a_loss_is_that_of_the_source(name: str, moves: bool) -> None:
    """Fresh: the policy has not moved since it has generated. Moved: by some clip ranges, so that
    the clip acts."""
    recipe, source = recipe_of(name), SOURCES[name]
    network, base = Linear(0), Linear(1)
    moved = 1.5 * recipe.algorithm.clip_range if moves else 0.0
    if recipe.algorithm.name == "grpo-guard":  # on the scale of its log-ratio
        moved *= 10
    advantages = advantages_of(recipe, rewards_of(recipe))
    groups = paths(recipe, source, network, advantages, moved)
    sets = WeightSets(network)
    sets.reference = {"weight": base.weight.detach()}
    transaction = GradientTransaction(
        model=Model(network),  # type: ignore[arg-type]
        algorithm=recipe.algorithm,
        num_rows=GROUPS * recipe.trained_samples * recipe.sampling.window,
        guidance=1.0,
        sets=sets,
    )
    transaction.begin()
    for group in groups:
        transaction.accumulate(group, Chunk(3, 2))
    assert network.weight.grad is not None
    found = transaction.take_kept_factor() * network.weight.grad
    assert agree(found, source_gradient(recipe, source, groups, network, base))
    metrics = transaction.metrics()
    clipped = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    assert (0 < clipped < 0.7) if moves else not clipped
    assert metrics["zero_advantage_fraction"] == pytest.approx(1 / GROUPS)


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in PATHS])
@pytest.mark.parametrize("moves", [False, True], ids=["one policy", "an old policy"])
def test_the_loss_of_finished_samples_is_that_of_the_source(name: str, moves: bool) -> None:
    """NVlabs/DiffusionNFT at 24af555, scripts/train_nft_sd3.py (read in pkuhxy/DiffusionNFT,
    619456aa): both branches about the old policy, each error over its own mean distance, by r = A /
    2c + 1/2, times c."""
    recipe = recipe_of(name)
    table, count = recipe.algorithm, recipe.sampling.window
    network, base, old = Linear(0), Linear(1), Linear(2 if moves else 0)
    advantages = advantages_of(recipe, rewards_of(recipe))
    sigmas = torch.tensor(sampling_plan(recipe, window_start=None).sigmas)
    steps, size = len(sigmas) - 1, recipe.batch.group_size
    noise = torch.Generator().manual_seed(3)
    drawn = [
        torch.stack([torch.randperm(steps, generator=noise)[:count] for _ in range(size)])
        for _ in range(GROUPS)
    ]
    groups = [
        FinishedGroup(
            samples=torch.randn(size, CHANNELS, *SHAPE, generator=noise, dtype=torch.float64),
            seeds=tuple(range(size * group, size * (group + 1))),
            indices=drawn[group], sigmas=sigmas, advantages=advantages[group], conditions={},
        )
        for group in range(GROUPS)
    ]  # fmt: skip
    sets = WeightSets(network)
    sets.reference, sets.old = {"weight": base.weight.detach()}, {"weight": old.weight.detach()}
    sets.old_differs = moves
    transaction = GradientTransaction(
        model=Model(network),  # type: ignore[arg-type]
        algorithm=table, num_rows=GROUPS * size * count, guidance=1.0, sets=sets,
    )  # fmt: skip
    transaction.begin()
    losses = []
    for group in groups:
        transaction.accumulate(group, Chunk(size, count))
        [rows] = group.rows(Chunk(size, count), torch.device("cpu"))
        x, clean = rows.noised, rows.clean
        s = rows.sigma.double().reshape(-1, 1, 1, 1)
        v = network(x, rows.sigma)
        with torch.no_grad():
            held, reference = old(x, rows.sigma), base(x, rows.sigma)
        r = (
            rows.advantage.clamp(-table.advantage_clip, table.advantage_clip) / table.advantage_clip
            + 1
        ) / 2

        def error(velocity: Tensor, x: Tensor = x, s: Tensor = s, clean: Tensor = clean) -> Tensor:
            off = x - s * velocity - clean
            return each(off**2) / each(off.detach().abs()).clamp(min=1e-5)

        beta = table.nft_beta
        good = error(held + beta * (v - held))
        bad = error(held - beta * (v - held))
        policy = table.advantage_clip * (r * good + (1 - r) * bad) / beta
        losses.append(policy + table.kl_beta * each((v - reference) ** 2))
    [wanted] = torch.autograd.grad(torch.cat(losses).mean(), [network.weight])
    assert network.weight.grad is not None
    assert agree(transaction.take_kept_factor() * network.weight.grad, wanted)


@pytest.mark.parametrize(("name", "kind"), [("pickscore", 1), ("ocr", 2)])
def test_the_old_policy_follows_as_the_source_s_does(name: str, kind: int) -> None:
    """The same script, return_decay: flat steps, rise per step and largest decay of each type."""
    recipe = recipe_of(f"diffusion-nft.sd35-{name}")
    flat, rise, largest = {1: (0, 0.001, 0.5), 2: (75, 0.0075, 0.999)}[kind]
    assert recipe.algorithm.nft_decay == kind
    for step in range(0, 700, 7):
        wanted = min(rise * (step - flat), largest) if step >= flat else 0.0
        assert old_policy_decay(kind, step) == pytest.approx(wanted)


@pytest.mark.parametrize("name", SOURCES)
def test_the_moving_average_looks_back_as_far_as_the_source_s(name: str) -> None:
    ema, source = recipe_of(name).trainer.ema, SOURCES[name].ema
    if source is None:
        assert ema is None
        return
    decay, every, calls = source
    assert ema is not None
    kept, steps = 1.0, 0  # the share of the first weights that is left
    while steps < 240:
        steps += 1
        kept *= decay**calls if steps % every == 0 else 1.0
    assert ema == pytest.approx(kept ** (1 / steps), abs=5e-4)
    if every > 1:
        assert f"`trainer.ema`, {ema} " in header(name)
        horizon = round(1 / (1 - kept ** (1 / steps)))
        assert f"the same horizon of {horizon} steps" in header(name)


def test_headers_give_the_size_of_what_is_left() -> None:
    """Noise in the last step; whole thousandths; how A matrices begin."""
    for name in PATHS:
        recipe, text = recipe_of(name), header(name)
        plan = sampling_plan(recipe, window_start=0)
        s = plan.sigmas[-2]
        noise = recipe.sampling.noise_level * s / math.sqrt(1 - s)
        if "`sde_step_with_logprob`" in text:
            assert f"noise of {noise:.3f} on latents" in text, name
        if "`timestep_value`" in text:
            below = max(s - int(s * 1000) / 1000 for s in plan.sigmas)
            assert 0 < below <= 0.001 and "up to 0.001 less" in text
        if "`init_lora_weights`" in text:
            width = 1536 if "wan" in name else 3072
            assert f"standard deviation {1 / recipe.model.lora.rank:.4f}" in text
            assert (
                f"(kaiming: {1 / math.sqrt(3 * width):.4f} at the network's width of {width}"
                in text
            )
    named = {name for name in SOURCES if "`sde_step_with_logprob`" in header(name)}
    assert named == {
        "flow-grpo.sd35-ocr", "flow-grpo.sd35-pickscore", "flow-grpo.sd35-geneval",
        "flow-grpo.flux1-dev", "grpo-guard.sd35-ocr",
    }  # fmt: skip
    rounded = {name for name in SOURCES if "`timestep_value`" in header(name)}
    assert rounded == {name for name in SOURCES if name.startswith(("dance-grpo.", "mix-grpo."))}
