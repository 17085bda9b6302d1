"""Makes a cost profile of a trace: its memory and operations, and seconds by assumed rates.

Nothing in it was measured. Operations become seconds at rates in the profiles of known models;
costs that no trace measures, such as a reward or the speed of another device, come from such a
profile. Imports no torch.
"""

import math
from pathlib import Path
from typing import Any

from digenrl.trace.memory import member_needs, rollout_needs, usual
from digenrl.trace.record import Trace
from services.scheduler.costs.profile import PROFILES, ProfileFile
from services.scheduler.costs.recipes import batch_shape, launches_alone
from services.scheduler.costs.sizes import Memory, forward_tflop
from services.scheduler.sim.steady import steady_fragment_size
from shared.errors import UserError
from shared.models.catalogue import find_family
from shared.recipe.recipe import Recipe

FORWARD_TFLOPS = 400.0
"""Operations of an H100 per second in a network's forward pass, in 1e12: HunyuanVideo's rate by its
profile; Wan2.1-14B has 410, FLUX.1-dev 370."""
DECODING_TFLOPS = 80.0
"""The same of a decoder in float32: an image's .03 s, and HunyuanVideo's 3.2 s."""
REWARD_SECONDS = {"image": 0.05, "video": 0.8}
CALL_SECONDS = {"image": 0.02, "video": 0.012}
DONOR_PROFILES = {"image": "flux1-dev", "video": "wan2.1-14b"}
"""Profiles that have what no trace sees."""
GIB = 2**30
DIGITS = 4


def traced_profile(recipe: Recipe, trace: Trace, *, name: str | None = None) -> ProfileFile:
    """Returns the cost profile of a model that is trained by LoRA, from a trace with its work.

    Args:
        name: name of the profile, by default the model's.

    Raises:
        UserError: if all weights are trained, which a profile's tables do not cover.
    """
    if recipe.model.trained != "lora":
        raise UserError(
            'model.trained: a trace makes a cost profile of "lora" only; name one with --profile'
        )
    assert trace.counted is not None, "a trace without the work of its network"
    what = "video" if recipe.model.frames > 1 else "image"
    like = ProfileFile.model_validate_json((PROFILES / f"{DONOR_PROFILES[what]}.json").read_text())
    memory = trace.memory(fragment=steady_fragment_size(recipe)).model_copy(
        update={
            "decode_gib": trace.counted.whole.peak_bytes / GIB,
            "tiled_gib": trace.counted.tiled.peak_bytes / GIB,
        }
    )
    forward = forward_tflop(trace.counted.work, trace.counted.work.size)
    decoding = sum(trace.counted.whole.flops.values()) / 1e12
    generation, training = _generation(memory, what, forward, decoding), _training(memory, trace)
    lora = like.variants["lora"].model_dump(exclude_defaults=True) | training
    plain: dict[str, Any] = {
        "name": name or recipe.model.name,
        "description": _description(recipe),
        "shape": batch_shape(recipe).model_dump(exclude_defaults=True),
        "launches": launches_alone(recipe, trace.launches).model_dump(),
        "embeds_guidance": find_family(recipe.model.folder).embeds_guidance,
        "rollout": like.rollout.model_dump(exclude={"held_gib", "sample_gib"}) | generation,
        "variants": {"lora": lora},
        "memory": memory.model_dump(),
        "work": trace.counted.work.model_dump(exclude_defaults=True),
        "devices": {kind: d.model_dump(exclude_defaults=True) for kind, d in like.devices.items()},
        "sources": _sources(like.name, forward),
    }
    return ProfileFile.model_validate(rounded(plain))


def _generation(memory: Memory, what: str, forward: float, decoding: float) -> dict[str, float]:
    return {
        "call_seconds": CALL_SECONDS[what],
        "sample_seconds": forward / FORWARD_TFLOPS,
        "decode_seconds": decoding / DECODING_TFLOPS,
        "reward_seconds": REWARD_SECONDS[what],
        "memory_gib": rollout_needs(memory, usual(memory)).total - memory.text_gib,
    }


def _training(memory: Memory, trace: Trace) -> dict[str, float]:
    published = trace.stored.weights / 1e9
    return {
        "forwards_per_step": trace.shape.forwards,
        "rho": trace.rho,
        "memory_gib": member_needs(memory, usual(memory)).total - memory.text_gib,
        "published_gb": published,
        "publish_seconds": published,
    }


def write_profile(costs: ProfileFile, path: Path) -> None:
    """Write a profile as JSON, for `--profile`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(costs.model_dump_json(indent=2, exclude_defaults=True) + "\n")


def _description(recipe: Recipe) -> str:
    table, shape = recipe.model, batch_shape(recipe)
    frames = f"{table.frames} frames, " if table.frames > 1 else ""
    return (
        f"{table.name}, {table.height}x{table.width}, {frames}{shape.steps} steps of which "
        f"{shape.trained_steps} are trained"
    )


def _sources(like: str, forward: float) -> dict[str, dict[str, str]]:
    def source(kind: str, note: str) -> dict[str, str]:
        return {"kind": kind, "note": note}

    counted = "Counted by a trace of the configuration"
    return {
        "devices": source("assumed", f"As {like}."),
        "launches": source("traced", f"{counted}: operations but views and allocations."),
        "memory": source(
            "traced",
            f"{counted}: peaks of a step of a fragment, of one decoded sample, and of one and two "
            "trained rows. Without the allocator's slack and kernels' work spaces.",
        ),
        "rollout": source(
            "assumed",
            f"Not measured: {forward:.3g} TFLOP for a row at {FORWARD_TFLOPS:g} TFLOP/s, decoding "
            f"at {DECODING_TFLOPS:g}; rewards as of other models.",
        ),
        "shape": source("recipe", "The shape of its recipe."),
        "variants": source("assumed", f"As {like} by size; rho by counted operations."),
        "work": source("traced", f"{counted}, with its adapter and prompts of full length."),
    }


def rounded(plain: Any) -> Any:
    """Returns a tree with its numbers rounded to the digits that count."""
    if isinstance(plain, dict):
        return {key: rounded(value) for key, value in plain.items()}
    if not isinstance(plain, float) or plain == 0:
        return plain
    digits = max(DIGITS, math.ceil(math.log10(abs(plain))))  # whole numbers stay whole
    return round(plain, digits - 1 - math.floor(math.log10(abs(plain))))
