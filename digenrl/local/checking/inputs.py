"""Checks that a recipe's model, prompts, scorers and their packages are there."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from services.reward.scorer import check_digits, check_packages, check_prompts, scorer_kind
from shared.errors import Faults, UserError
from shared.learning.prompt_rows import Row
from shared.learning.prompts import num_empty, read_prompts
from shared.messages.contracts import Prompt
from shared.models.catalogue import (
    check_family,
    check_parts,
    check_size,
    check_weights,
    text_tokens,
)
from shared.models.hub import missing
from shared.models.model_errors import no_model
from shared.models.source_tokens import check_source_tokens
from shared.recipe.adapter import check_adapter_here
from shared.recipe.networks import check_networks, no_negative
from shared.recipe.recipe import Recipe
from shared.run.run_recipe import held_out_rows, prompt_order, trained_and_held_out


def check_inputs(
    recipe: Recipe, *, weights: bool = True, elsewhere: bool = False, begun: bool = False
) -> None:
    """Check that every file and name in the recipe exists.

    Args:
        weights: the network's weights have to be there, not only configurations.
        elsewhere: as in `check_except_model`.
        begun: as in `check_except_model`.

    Raises:
        UserError: with a line for everything that is missing.
    """
    faults = Faults()
    with faults.collected():
        _check_model(recipe, weights=weights, elsewhere=elsewhere)
    with faults.collected():
        check_except_model(recipe, elsewhere=elsewhere, begun=begun)
    faults.raise_any()
    family = check_family(recipe.model.folder)
    for key, path in (("data", recipe.data.prompts), ("evaluation", recipe.evaluation.prompts)):
        if path is not None:
            _check_images(f"{key}.prompts", path, recipe.model.folder, family.takes_image)
            _check_negatives(f"{key}.prompts", path, no_negative(recipe))
    for scorer in (*recipe.reward.scorers, *recipe.evaluation.scorers):
        if scorer_kind(scorer, here=not elsewhere).takes == "videos" and not family.makes_videos:
            raise UserError(
                f"reward.scorers.{scorer.name}.type: {scorer.type} scores videos, and "
                f"{recipe.model.folder} makes images"
            )


def _check_model(recipe: Recipe, *, weights: bool, elsewhere: bool) -> None:
    folder = recipe.model.folder
    check_folder(folder)
    family, faults = check_family(folder), Faults()
    checks: list[Callable[[], object]] = [
        partial(_check_sizes, recipe),
        partial(check_networks, recipe),
        partial(text_tokens, folder, recipe.model.text_tokens),
    ]
    if weights:
        checks += [partial(check_weights, folder), partial(check_parts, folder)]
    if not elsewhere:
        checks += [partial(check_adapter_here, recipe), partial(_check_source_tokens, recipe)]
    for check in checks:
        with faults.collected():
            check()
    if recipe.model.frames > 1 and not family.makes_videos:
        faults.append(f"model.frames: {folder} makes images, not videos; remove frames")
    faults.raise_any()


def check_folder(folder: Path) -> None:
    """Raises UserError, with the remedy, if the model's folder is not on this host."""
    if not folder.is_dir():
        is_there = no_model(folder) if folder.exists() else None
        raise UserError(
            missing(folder)
            or is_there
            or f"model.folder: {folder} does not exist; put the model there as a diffusers folder, "
            "name one on the hub with model.id, or check the rest with --elsewhere"
        )


def skipped_rows(recipe: Recipe) -> list[str]:
    """Return a line for each file of prompts that has rows without one."""
    named = {"data": recipe.data.prompts, "evaluation": recipe.evaluation.prompts}
    numbers = {key: num_empty(path) for key, path in named.items() if path is not None}
    return [
        f"{key}.prompts: {number} rows without a prompt are left out"
        for key, number in numbers.items() if number
    ]  # fmt: skip


def _check_negatives(key: str, prompts: Path, reason: str | None) -> None:
    """Raises UserError if prompts have negative ones that have no effect."""
    if reason and any(prompt.negative_prompt for prompt in read_prompts(prompts)):
        raise UserError(
            f"{key}: {prompts} has a column negative_prompt, and {reason}; leave the column out"
        )


def _check_images(key: str, prompts: Path, folder: Path, takes_image: bool) -> None:
    """Raises UserError unless prompts have source images just where the model takes one."""
    has_image = read_prompts(prompts)[0].image is not None
    if has_image and not takes_image:
        raise UserError(
            f"{key}: {prompts} has images, and {folder} makes samples of text alone; leave the "
            "images out, or choose a model that edits images"
        )
    if takes_image and not has_image:
        raise UserError(
            f'{key}: {folder} edits images, and {prompts} names none; give each prompt an "image", '
            "a path relative to that file"
        )


def _check_sizes(recipe: Recipe) -> None:
    folder, trained, evaluated = recipe.model.folder, recipe.model, recipe.evaluation
    check_size(folder, "model", height=trained.height, width=trained.width)
    check_size(
        folder,
        "evaluation",
        height=evaluated.height or trained.height,
        width=evaluated.width or trained.width,
    )


def _check_source_tokens(recipe: Recipe) -> None:
    model, evaluated = recipe.model, recipe.evaluation
    for table, height, width in (
        ("model", model.height, model.width),
        ("evaluation", evaluated.height or model.height, evaluated.width or model.width),
    ):
        check_source_tokens(
            model.folder, model.text_tokens, table=table, height=height, width=width
        )


def check_except_model(recipe: Recipe, *, elsewhere: bool = False, begun: bool = False) -> None:
    """Check everything that `check_inputs` does, except the model.

    Args:
        elsewhere: the rewards and rollout, with their packages and folders, are on other hosts.
        begun: it is the recipe of a run in progress, even if its prompts lack something.

    Raises:
        UserError: if something is missing."""
    faults, trained, held_out = Faults(), tuple[Row, ...](), tuple[Row, ...]()
    with faults.collected():
        prompt_order(recipe)
        trained, held_out = trained_and_held_out(recipe)
    if recipe.evaluation.prompts is not None:
        with faults.collected():
            held_out = held_out_rows(recipe)
    for scorer in (*recipe.reward.scorers, *recipe.evaluation.scorers):
        with faults.collected():
            scorer_kind(scorer, here=not elsewhere)
            if not elsewhere:
                check_packages(scorer)
    judges = None if elsewhere else recipe.evaluation.digits
    if judges is not None and not judges.is_dir():
        faults.append(f"evaluation.digits: no folder {judges}")
    faults.raise_any()
    if not (elsewhere or begun):
        prompts, evaluated = ([row[0] for row in rows] for rows in (trained, held_out or trained))
        _check_prompt_metadata(recipe, prompts, evaluated)


def _check_prompt_metadata(
    recipe: Recipe, prompts: Sequence[Prompt], evaluated: Sequence[Prompt]
) -> None:
    """Raises UserError if a prompt does not have what a scorer, or the judges of digits, asks
    for."""
    trained = recipe.reward.scorers
    for table in trained:
        check_prompts(table, prompts)
    for table in (*trained, *recipe.evaluation.scorers):
        check_prompts(table, evaluated)
    if recipe.evaluation.digits is not None:
        check_digits(evaluated)
