"""The steps of `digenrl init`: inputs, trace, recipe, check, and four samples with rewards."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from digenrl.hub.rewards import fetch_rewards
from digenrl.local.checking.check import check
from digenrl.local.checking.inputs import check_inputs
from digenrl.local.checking.reward_trial import RewardTrialResult, score_images
from digenrl.local.first_recipe import (
    InitRequest,
    first_tables,
    fit_to_gpus,
    recipe_from,
    write_recipe,
)
from services.reward.scorer import build_scorers
from shared.errors import ScoringError, UserError
from shared.recipe.recipe import Recipe
from shared.run.run_recipe import evaluated_on, held_out_rows, trained_and_held_out

NUM_SAMPLES = 4


def first_run(request: InitRequest, *, sampled: bool, say: Callable[[str], None]) -> Iterator[str]:
    """Write the recipe and yield lines about it; leave no file behind if the recipe cannot run.

    Raises:
        UserError: with a line for each fault.
        ScoringError: if a sample has no reward; the recipe is written.
    """
    made = [path for path in (request.out, request.typed_prompts) if not path.exists()]
    try:
        tables = first_tables(request)
        recipe = recipe_from(request, tables)
        for folder in fetch_rewards(recipe, say):
            say(f"reward: {folder}")
        check_inputs(recipe)
        tables, devices, profile = fit_to_gpus(request, tables, recipe, say)
        write_recipe(request, tables, devices)
        checked = check(request.out, profile=profile)
        if not checked.verdict.can_run:
            raise UserError(checked.verdict.sentence)
    except BaseException as error:
        for path in filter(Path.exists, made):
            path.unlink()
        if isinstance(error, UserError):
            raise UserError(request.name_options(str(error))) from error
        raise
    evaluated = evaluated_on(len(held_out_rows(checked.recipe)))
    yield f"{request.out}: for {devices}; evaluations measure {evaluated}"
    yield checked.verdict.sentence
    if sampled:
        yield from _show_samples(checked.recipe, request.out.with_suffix(".samples"))
    yield f"train it: digenrl up {shlex.quote(str(request.out))}"


def _show_samples(recipe: Recipe, folder: Path) -> Iterator[str]:
    """Sample the first prompts of training with the model as it is, and score the samples."""
    from digenrl.evaluation.settings import as_evaluated
    from digenrl.report.generate import generate
    from shared.process.worker_process import prepare_libraries

    rows = (trained_and_held_out(recipe)[0] * NUM_SAMPLES)[:NUM_SAMPLES]
    texts, images = [prompt.text for prompt, _ in rows], [path for _, path in rows if path]
    yield f"four samples of the model before training, in {folder}:"
    prepare_libraries(recipe, threads=recipe.trainer.threads)
    list(generate(as_evaluated(recipe), None, texts, images=images, num_each=1, seed=0, out=folder))
    scorers = build_scorers(recipe.reward.scorers)
    scores = [score_images(each, folder, rows) for each in scorers]
    yield from reward_lines(scores, [each.weight for each in scorers])


def reward_lines(
    scores: Sequence[Sequence[RewardTrialResult]], weights: Sequence[float]
) -> Iterator[str]:
    """Yield a line for each sample with its reward by the scores of each scorer, and which samples
    training prefers; raises ScoringError after the lines if a sample has no reward."""
    rewards = list[tuple[float, str]]()
    for results in zip(*scores, strict=True):
        reasons = [each.reason for each in results if each.score is None]
        reward = sum(w * (each.score or 0) for w, each in zip(weights, results, strict=True))
        shown = f"no reward: {reasons[0]}" if reasons else f"{reward:.4g}"
        yield f"  {results[0].image}  {shown}  {results[0].prompt}"
        rewards += [] if reasons else [(reward, results[0].image)]
    if missing := len(scores[0]) - len(rewards):
        raise ScoringError(f"{missing} of {len(scores[0])} samples have no reward")
    (low, worst), (high, best) = min(rewards), max(rewards)
    preferred = (
        f"samples like {best} ({high:.4g}) more frequent, and like {worst} ({low:.4g}) rarer"
    )
    if low == high:
        preferred = "no difference here, because all rewards are equal"
    yield f"is this the reward you mean? Training makes {preferred}"
