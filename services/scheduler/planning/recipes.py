"""What a recipe says of a cost profile's shape, and of how the devices are to be kept busy."""

import contextlib
import math
from collections.abc import Iterable
from typing import Literal

from services.scheduler.core.supply import full_size
from services.scheduler.costs.memory import Use
from services.scheduler.costs.profile import Profile, Rollout
from services.scheduler.costs.shape import Shape
from services.scheduler.costs.sizes import Size, Work, forward_tflop, rho
from services.scheduler.sim.profiled import steady_plan
from shared.devices.chunks import make_tuner
from shared.errors import UserError
from shared.learning.algorithms import ALGORITHMS
from shared.models.memory import ITEM_BYTES
from shared.models.published import alike, configuration_of
from shared.recipe.recipe import Recipe
from shared.recipe.schedule import RunSchedule


def profile_of(recipe: Recipe, known: Iterable[str]) -> str:
    """The profile of the model whose published network has the same shape as the recipe's: by its
    configuration, or before it is fetched, by the one that is published under its name.

    Raises:
        UserError: if there is none.
    """
    model, names = recipe.model, sorted(known)
    with contextlib.suppress(UserError):  # of a family that has no profile
        if name := alike(configuration_of(model.folder, model.name).folder, names):
            return name
    raise UserError(
        f"--profile: no cost profile has a network like that of {model.name}; name one of "
        f"{', '.join(names)}, measure one with `digenrl profile`, or make one with `digenrl check "
        "RECIPE --trace --save-profile FILE.json`"
    )


def with_shape_of(profile: Profile, recipe: Recipe) -> Profile:
    """The same costs for this recipe's batch, its samples' size and its training passes.

    Seconds of a call scale with the operations of the network, those of decoding with the pixels;
    both stay as they are if the profile does not count operations.
    """
    guided = recipe.model.guidance > 1 and not profile.embeds_guidance
    forwards: Literal[1, 2] = 2 if guided else 1
    shape = shape_of(recipe)
    changes: dict[str, object] = {"forwards_per_step": forwards}
    rollout = profile.rollout
    if profile.work is not None:
        size = _size_of(recipe, profile.work)
        rollout = _scaled(rollout, profile.work, size)
        changes["rho"] = _rho_of(recipe, profile.work, size)
    variant = profile.variant.model_copy(update=changes)
    return profile.model_copy(update={"shape": shape, "variant": variant, "rollout": rollout})


def shape_of(recipe: Recipe) -> Shape:
    """What the recipe's batch consists of."""
    return Shape(
        groups=recipe.batch.groups,
        group_size=recipe.batch.group_size,
        steps=recipe.sampling.num_steps,
        trained_steps=recipe.sampling.window,
        updates=recipe.trainer.updates,
        shared_steps=recipe.sampling.shared_steps,
        merged_steps=recipe.sampling.merged_steps,
        trained_samples=recipe.trained_samples,
    )


def _size_of(recipe: Recipe, work: Work) -> Size:
    model = recipe.model
    return Size(
        height=model.height,
        width=model.width,
        frames=model.frames,
        text_tokens=model.text_tokens or work.text_tokens,
    )


def _scaled(rollout: Rollout, work: Work, size: Size) -> Rollout:
    pixels = size.height * size.width * size.frames / (work.height * work.width * work.frames)
    operations = forward_tflop(work, size) / forward_tflop(work, work.size)
    return rollout.model_copy(
        update={
            "sample_seconds": rollout.sample_seconds * operations,
            "decode_seconds": rollout.decode_seconds * pixels,
        }
    )


def passes_beside(recipe: Recipe) -> float:
    """Forward passes of a trained row without a backward pass: of the base model for the KL too."""
    return int(recipe.algorithm.kl_beta > 0) + _passes_of_others(recipe)


def _passes_of_others(recipe: Recipe) -> float:
    """Passes of an old policy that samples, or in later updates of that at the batch's start."""
    later = 1 - 1 / recipe.trainer.updates
    return int(recipe.keeps_old_policy) + later * recipe.keeps_batch_start


def differentiated(recipe: Recipe) -> float:
    """Share of a trained row's forward pass that a backward pass follows: half of it where the
    unconditional half of classifier-free guidance has none."""
    return 0.5 if recipe.algorithm.cfg_gradient == "conditional" else 1.0


def _rho_of(recipe: Recipe, work: Work, size: Size) -> float:
    apart, recomputes = recipe.sums_apart, recipe.trainer.gradient_checkpointing
    return _passes_of_others(recipe) + rho(
        work,
        size,
        full=recipe.model.trained == "full",
        recomputes=recomputes,
        kl=recipe.algorithm.kl_beta > 0,
        forwards=1 + (apart and bool(recomputes or recipe.trainer.sharded)),
        backwards=1 + apart,
        differentiated=differentiated(recipe),
    )


def fragment_of(recipe: Recipe) -> int:
    """Samples per fragment while there is plenty, on as many devices as the recipe starts."""
    plan = steady_plan(shape_of(recipe), batches=1, schedule=recipe.run_schedule)
    lent = recipe.trainer.devices if recipe.trainer_may_help or recipe.schedule.is_fluid else 0
    return full_size(plan, recipe.rollout.workers + lent)


def use_of(recipe: Recipe, profile: Profile, *, fragment: int) -> Use:
    """What memory depends on. Training passes are of as few rows as the recipe allows."""
    model, trainer, method = recipe.model, recipe.trainer, ALGORITHMS[recipe.algorithm.name]
    return Use(
        height=model.height,
        width=model.width,
        frames=model.frames,
        forwards=profile.variant.forwards_per_step,
        item_bytes=ITEM_BYTES[model.dtype],
        rank=model.lora.rank if model.trained == "lora" else 0,
        rows=make_tuner(recipe, math.inf).candidates[0].rows,
        fragment=fragment,
        ranks=trainer.devices if trainer.sharded else 1,
        helps=recipe.trainer_may_help or recipe.schedule.is_fluid,
        can_train=recipe.rollout.can_train,
        averages=trainer.ema is not None,
        compares=recipe.keeps_reference,
        sums_apart=recipe.sums_apart,
        encodes="text" in recipe.generating_parts,
        tiles=model.vae_tiling,
        streams=recipe.holding.memory == "streamed",
        weights=recipe.holding.weights,
        can_weigh=method.corrects_staleness or not method.has_ratio,
    )


def with_staleness(schedule: RunSchedule, staleness: Literal[0, 1] | None) -> RunSchedule:
    """Return the schedule with this staleness in place of the recipe's.

    Raises:
        UserError: if the mode has no asynchrony.
    """
    if staleness is None:
        return schedule
    if staleness and schedule.mode not in ("pipelined", "fluid"):
        raise UserError(
            "--staleness: 1 needs schedule.mode pipelined or fluid; the mode here is "
            f"{schedule.mode}"
        )
    return schedule.changed(max_staleness=staleness)
