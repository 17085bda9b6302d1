"""Checks a recipe against the networks of its model's folder, which its tables do not describe."""

from shared.errors import UserError
from shared.learning.algorithms import ALGORITHMS
from shared.models.catalogue import boundary, find_family
from shared.models.families import EXPERTS
from shared.recipe.tables import Tables


def check_networks(recipe: Tables) -> None:
    """Raises UserError if the model has not the networks that the recipe speaks of."""
    table, family = recipe.model, find_family(recipe.model.folder)
    if table.attention is not None and not family.names_attention:
        raise UserError(
            f"model.attention: the network of a {family.pipeline} always calls torch's own "
            "attention; leave it out"
        )
    if recipe.algorithm.cfg_gradient == "conditional" and family.forwards(table.guidance) == 1:
        raise UserError(
            f"algorithm.cfg_gradient: a {family.pipeline} takes guidance as an input of its "
            "network, so that there is no unconditional half; leave it out"
        )
    if table.negative_prompt and family.forwards(table.guidance) == 1:
        raise UserError(f"model.negative_prompt: {no_negative(recipe)}; leave it out")
    if boundary(table.folder) is not None:
        _check_shards(recipe)
        return
    of_two = {
        "model.guidance_2": table.guidance_2 is not None,
        "model.lora.experts": table.lora.experts != "both",
    }
    for key, is_set in of_two.items():
        if is_set:
            raise UserError(
                f"{key}: it is for a model with a second network, for low noise, and "
                f"{table.folder} has one network; leave it out"
            )


def negative_prompt(recipe: Tables) -> str:
    """Return the negative prompt of prompts without their own."""
    own = recipe.model.negative_prompt
    return find_family(recipe.model.folder).negative_prompt if own is None else own


def no_negative(recipe: Tables) -> str | None:
    """Return why a negative prompt has no effect; None if it has one."""
    family, guidance = find_family(recipe.model.folder), recipe.model.guidance
    if family.embeds_guidance:
        return f"a {family.pipeline} takes guidance as an input of its network"
    return None if guidance > 1 else f"model.guidance {guidance:g} is no classifier-free guidance"


def frozen_layers(recipe: Tables) -> tuple[str, ...]:
    """Return the prefixes of layers without adapter: the layers of an expert that is not
    trained."""
    trained = recipe.model.lora.experts
    return tuple(f"{name}." for side, name in EXPERTS.items() if trained not in ("both", side))


def _check_shards(recipe: Tables) -> None:
    """Ranks that share weights gather them together, so they have to ask the same network."""
    has_window = ALGORITHMS[recipe.algorithm.name].has_window
    if recipe.trainer.is_sharded and has_window and recipe.sampling.trained == "random":
        raise UserError(
            "trainer.shard_devices: the two networks of this model cannot be gathered for samples "
            "that are trained at steps of their own; set it to 1, or sampling.trained to "
            '"window"'
        )
    if recipe.trainer.is_sharded and not has_window:
        raise UserError(
            f"trainer.shard_devices: {recipe.algorithm.name} trains every sample at noise of its "
            "own, and the two networks of this model cannot be gathered for unlike samples; set it "
            "to 1, or use an algorithm with a window"
        )
