"""Describes the division of a batch's work between generation and training."""

import math
from collections.abc import Iterator

from services.scheduler.costs.profile import Profile
from services.scheduler.costs.recipes import differentiated, num_forward_only_passes
from services.scheduler.costs.seconds import generation_work, training_work
from services.scheduler.costs.shape import Shape, rollout_equivalents, training_equivalents
from shared.recipe.recipe import Recipe


def seconds_words(seconds: float) -> str:
    """Format seconds by three digits."""
    if math.isinf(seconds):
        return "impossible"
    return f"{seconds:.0f}" if seconds >= 1000 else f"{seconds:.3g}"


def sample_seconds(profile: Profile) -> dict[str, float]:
    """Return the seconds of an H100 that a sample takes to generate, in whole groups, and to
    train."""
    samples = profile.shape.samples
    return {
        "generate": generation_work(profile) / samples,
        "train": training_work(profile) / samples,
    }


def work_line(profile: Profile, recipe: Recipe) -> str:
    """Describe the share of training in the work, by counting and by the profile's seconds."""
    shape, seconds = profile.shape, sample_seconds(profile)
    generates = rollout_equivalents(shape, shape.group_size)
    trains = training_equivalents(
        shape,
        forward_only_passes=num_forward_only_passes(recipe),
        differentiated=differentiated(recipe),
    )
    counted = trains / (generates + trains)
    share = seconds["train"] / sum(seconds.values())
    ratio = seconds["generate"] / seconds["train"]
    pace = f"{ratio:.1f} generate as fast as one trains"
    if ratio < 1:
        pace = f"{1 / ratio:.1f} train as fast as one generates"
    shared = "".join(f"; {text}" for text in _shared(shape))
    return (
        f"a sample takes {generates:.2f} rows of the network to generate and {trains:.2f} to train "
        f"({counted:.0%}, a backward pass counted as two); by the profile training is {share:.0%} "
        f"of the seconds, and of equal devices {pace}{shared}"
    )


def _shared(shape: Shape) -> Iterator[str]:
    if shape.shared_steps:
        yield (
            f"a fragment computes {shape.shared_steps:g} of {shape.steps} steps once for all its "
            "samples, so fragments of whole groups take the least"
        )
    if shape.merged_steps:
        yield f"a group computes {shape.merged_steps} of {shape.trained_steps} trained steps once"
