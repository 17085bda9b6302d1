"""The cost profile of a recipe's network, with the costs of the recipe's own batch and samples."""

import contextlib
from typing import Literal

from services.scheduler.costs.host import Launches
from services.scheduler.costs.profile import (
    OWN_GATHERS,
    Profile,
    Rollout,
    load_profile,
    profile_names,
)
from services.scheduler.costs.shape import Shape
from services.scheduler.costs.sizes import NetworkWork, SampleSize, forward_tflop, rho
from shared.errors import UserError
from shared.models.published import alike, find_configuration
from shared.recipe.recipe import Recipe


def profile_for(recipe: Recipe) -> str:
    """The profile of the model whose published network has the same shape as the recipe's: by its
    configuration, or before it is fetched, by the one that is published under its name.

    Raises:
        UserError: if there is no such profile.
    """
    model, names = recipe.model, profile_names()
    with contextlib.suppress(UserError):  # of a family that has no profile
        if name := alike(find_configuration(model.folder, model.name).folder, names):
            return name
    raise UserError(
        f"--profile: no cost profile fits the network of {model.name}; name one of "
        f"{', '.join(names)}, measure one with `digenrl profile`, or make one with `digenrl check "
        "RECIPE --trace --save-profile FILE.json`"
    )


def recipe_costs(recipe: Recipe, name: str | None = None) -> Profile:
    """The costs of this recipe's batch by the profile of that name, or of the model's network.

    Raises:
        UserError: if there is no such profile.
    """
    profile = load_profile(name or profile_for(recipe), recipe.model.trained)
    return fit_to_recipe(profile, recipe)


def fit_to_recipe(profile: Profile, recipe: Recipe) -> Profile:
    """The same costs for this recipe's batch, its samples' size and its training passes.

    Seconds of a call scale with the operations of the network, seconds of decoding with the pixels;
    both are unchanged if the profile does not count operations.
    """
    guided = recipe.model.guidance > 1 and not profile.embeds_guidance
    forwards: Literal[1, 2] = 2 if guided else 1
    shape = batch_shape(recipe)
    changes: dict[str, object] = {
        "forwards_per_step": forwards,
        "ranks": recipe.trainer.shard_devices,
        "gathers": OWN_GATHERS + num_forward_only_passes(recipe),
    }
    rollout = profile.rollout
    if profile.work is not None:
        size = _sample_size(recipe, profile.work)
        rollout = _scaled(rollout, profile.work, size)
        changes["rho"] = _training_ratio(recipe, profile.work, size)
    variant = profile.variant.model_copy(update=changes)
    launches = None if profile.launches is None else _pass_launches(recipe, profile.launches)
    return profile.model_copy(
        update={"shape": shape, "variant": variant, "rollout": rollout, "launches": launches}
    )


def batch_shape(recipe: Recipe) -> Shape:
    """Return the composition of the recipe's batch."""
    return Shape(
        groups=recipe.batch.groups,
        group_size=recipe.batch.group_size,
        steps=recipe.sampling.steps,
        trained_steps=recipe.sampling.window,
        updates=recipe.trainer.updates,
        shared_steps=recipe.sampling.shared_steps,
        merged_steps=recipe.sampling.merged_steps,
        trained_samples=recipe.trained_samples,
    )


def _sample_size(recipe: Recipe, work: NetworkWork) -> SampleSize:
    model = recipe.model
    return SampleSize(
        height=model.height,
        width=model.width,
        frames=model.frames,
        text_tokens=model.text_tokens or work.text_tokens,
    )


def _scaled(rollout: Rollout, work: NetworkWork, size: SampleSize) -> Rollout:
    pixels = size.height * size.width * size.frames / (work.height * work.width * work.frames)
    operations = forward_tflop(work, size) / forward_tflop(work, work.size)
    return rollout.model_copy(
        update={
            "sample_seconds": rollout.sample_seconds * operations,
            "decode_seconds": rollout.decode_seconds * pixels,
        }
    )


def _pass_launches(recipe: Recipe, counted: Launches) -> Launches:
    """Return the kernels of the recipe's training passes, from a pass with checkpoints and
    without KL."""
    added = round(_forwards_added(recipe) * counted.step)
    return counted.model_copy(update={"training_pass": counted.training_pass + added})


def launches_alone(recipe: Recipe, traced: Launches) -> Launches:
    """The kernels of a training pass with checkpoints and no KL, by a trace of the recipe."""
    added = round(_forwards_added(recipe) * traced.step)
    return traced.model_copy(update={"training_pass": traced.training_pass - added})


def _forwards_added(recipe: Recipe) -> float:
    """Forward passes of a training pass beyond those with a gradient and for checkpoints, each of
    which launches about as many kernels as a step."""
    return num_forward_only_passes(recipe) - (recipe.trainer.gradient_checkpointing is False)


def num_forward_only_passes(recipe: Recipe) -> float:
    """Forward passes of a trained row without a backward pass: of the base model for the KL too."""
    return int(recipe.algorithm.kl_beta > 0) + _extra_passes(recipe)


def _extra_passes(recipe: Recipe) -> float:
    """Passes of an old policy that samples, or in later updates of that at the batch's start."""
    later = 1 - 1 / recipe.trainer.updates
    return int(recipe.keeps_old_policy) + later * recipe.keeps_batch_start


def differentiated(recipe: Recipe) -> float:
    """Share of a trained row's forward pass that a backward pass follows: half of it where the
    unconditional half of classifier-free guidance has none."""
    return 0.5 if recipe.algorithm.cfg_gradient == "conditional" else 1.0


def _training_ratio(recipe: Recipe, work: NetworkWork, size: SampleSize) -> float:
    recomputes = recipe.trainer.gradient_checkpointing
    return _extra_passes(recipe) + rho(
        work,
        size,
        full=recipe.model.trained == "full",
        recomputes=recomputes,
        kl=recipe.algorithm.kl_beta > 0,
        differentiated=differentiated(recipe),
    )
