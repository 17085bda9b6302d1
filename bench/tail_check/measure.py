"""Samples a recipe's prompts with all steps and with a coarse tail, and compares their rewards.

A tail replaces the steps after the end of the last window by fewer, longer ones. Both samples are
made by the generator of rollout, from the same noise: up to the end of the last window a sample is
the same in both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.tail_check.agreement import Agreement, agreement
from services.reward.scorer import Media, WeightedScorer, build_scorers, scorer_inputs
from services.reward.scoring import load_source, score_samples
from shared.diffusion.generation import Generator
from shared.diffusion.policy import load_policy
from shared.diffusion.sampling.tensors import unpack
from shared.learning.prompts import PromptOrder, SourceFiles, read_prompts
from shared.messages.contracts import Fragment, GenerateFragment, Policy, Prompt
from shared.models.sigmas import Sigmas
from shared.process.outgoing import allow
from shared.recipe.recipe import Recipe, override
from shared.recipe.sampling import make_sigmas

Scores = Sequence[float | None]
OnProgress = Callable[[int, int], None]
"""Gets the number of prompts done, and of all prompts."""


@dataclass(frozen=True, slots=True)
class TailCheck:
    """Holds what was measured of one tail."""

    prompts: int
    reward: Agreement
    """Agreement of the rewards by which samples are trained."""
    scorers: Mapping[str, Agreement]


@dataclass(frozen=True, slots=True)
class Group:
    """Holds the scores of a prompt's samples."""

    parts: Mapping[str, Scores]
    """Scorer -> scores."""
    rewards: Scores


def tail_check(
    recipe: Recipe, coarse: Recipe, *, num_prompts: int, num_samples: int, progress: OnProgress
) -> TailCheck:
    """Sample the base model by a recipe and by the same with a tail, and compare the rewards.

    The prompts are those that the run begins with.

    Raises:
        ScoringError: if a scorer fails.
        UserError: if something that the recipe names is missing.
    """
    order, batch = PromptOrder(read_prompts(recipe.data.prompts), recipe.run.seed), 0
    num_prompts = min(num_prompts, len(order.prompts))
    sources = SourceFiles(recipe.data.prompts)
    allow(table.url for table in recipe.reward.scorers)
    scorers = build_scorers(recipe.reward.scorers)
    holding = replace(recipe.trainer_holding, memory=recipe.holding.memory)
    loaded = load_policy(recipe, {"transformer", "text", "decoder"}, holding=holding)
    generators = [Generator(each, loaded) for each in (recipe, coarse)]
    groups: list[list[Group]] = [[], []]
    for number in range(num_prompts):
        progress(number, num_prompts)
        prompt = order.of_group(batch, number, num_prompts)
        task = _task(recipe, prompt, number, num_samples, generators[0].weights_digest())
        for made, generator in zip(groups, generators, strict=True):
            source = sources.read(prompt.image)
            images = unpack(generator.generate(task, source).media)["images"].numpy()
            edited = None if source is None else load_source(source, images)
            made.append(_scored(scorers, images, scorer_inputs(prompt, edited)))
    progress(num_prompts, num_prompts)
    return _compared(recipe, *groups)


def with_coarse_tail(recipe: Recipe, num_steps: int) -> Recipe:
    """Return the recipe with ``num_steps`` steps after the end of its last window, as numbers;
    its evaluations keep all steps."""
    sampling, whole = recipe.sampling, make_sigmas(recipe.sampling)
    end = sampling.first_window_starts[1] + sampling.window
    steps, sigmas = recipe.evaluation.steps, recipe.evaluation.sigmas
    return override(
        recipe,
        {
            "sampling.steps": end + num_steps, "sampling.sigmas": with_tail(whole, end, num_steps),
            "evaluation.steps": steps or sampling.steps,
            "evaluation.sigmas": sampling.sigmas if sigmas is None else sigmas,
        },
    )  # fmt: skip


def with_tail(sigmas: Sigmas, start: int, num_steps: int) -> Sigmas:
    """Return the same grid up to the sigma at index ``start``, and from there to 0 in
    ``num_steps`` steps: evenly spaced in the grid's index, linear between two of its sigmas.

    >>> with_tail(linear_sigmas(10), 4, 3)[:5], len(with_tail(linear_sigmas(10), 4, 3)) - 1
    ((1.0, 0.9, 0.8, 0.7, 0.6), 7)
    """
    last = len(sigmas) - 1
    return (
        *sigmas[: start + 1],
        *(
            _between(sigmas, start + (last - start) * step / num_steps)
            for step in range(1, num_steps)
        ),
        sigmas[-1],
    )


def _between(sigmas: Sigmas, index: float) -> float:
    """Returns the sigma at an index that need not be whole."""
    before = int(index)
    part = index - before
    return (1 - part) * sigmas[before] + part * sigmas[before + 1]


def _task(
    recipe: Recipe, prompt: Prompt, group: int, num_samples: int, digest: str
) -> GenerateFragment:
    """Returns the task to generate a group, as rollout is given it in the first batch."""
    return GenerateFragment(
        fragment=Fragment(batch=0, group=group, first_sample=0, num_samples=num_samples, attempt=0),
        policy=Policy(version=0, weights_digest=digest),
        prompt=prompt,
        window_start=recipe.sampling.moving_window.start(recipe.run.seed, 0, group),
        worker="tail-check",
    )


def _scored(scorers: Sequence[WeightedScorer], images: Media, told: Mapping[str, object]) -> Group:
    metadata = [told] * len(images)
    parts = {
        each.name: score_samples(each, images, metadata, may_all_fail=True) for each in scorers
    }
    rewards = [
        _weighted(scorers, {name: scores[sample] for name, scores in parts.items()})
        for sample in range(len(images))
    ]
    return Group(parts, rewards)


def _weighted(
    scorers: Sequence[WeightedScorer], scores: Mapping[str, float | None]
) -> float | None:
    """Returns the reward of a sample; None if a scorer has none."""
    found = [(each.weight, scores[each.name]) for each in scorers]
    known = [weight * score for weight, score in found if score is not None]
    return sum(known) if len(known) == len(found) else None


def _compared(recipe: Recipe, whole: Sequence[Group], coarse: Sequence[Group]) -> TailCheck:
    def advantages(groups: Sequence[Group]) -> list[Scores]:
        found: list[Scores] = []
        for group in groups:
            each = recipe.advantages.for_group(group.rewards, group.parts)
            found.append(
                [a if r is not None else None for a, r in zip(each, group.rewards, strict=True)]
            )
        return found

    rewards = agreement([group.rewards for group in whole], [group.rewards for group in coarse])
    within = agreement(advantages(whole), advantages(coarse))
    return TailCheck(
        prompts=len(whole),
        reward=within.model_copy(update={"overall": rewards.overall}),
        scorers={
            scorer.name: agreement(
                [group.parts[scorer.name] for group in whole],
                [group.parts[scorer.name] for group in coarse],
            )
            for scorer in recipe.reward.scorers
        },
    )
