"""What the tables of a recipe ask of one another: batch arithmetic, and which devices go together.

Each raises ValueError, which names the field and the remedy.
"""

from typing import TYPE_CHECKING

from shared.messages.codec import group_bytes
from shared.messages.contracts import MAX_FRAGMENTS_PER_GROUP, MAX_MESSAGE_BYTES, MAX_SCORERS

if TYPE_CHECKING:
    from shared.recipe.recipe import Recipe


def check_devices(recipe: "Recipe") -> None:
    _check_colocated(recipe)
    _check_ranks(recipe)
    _check_full(recipe)
    _check_updates(recipe)
    several = {
        "rollout.can_train": recipe.rollout.can_train,
        "trainer.devices": recipe.trainer.devices > 1,
        "trainer.ranks": recipe.trainer.ranks > 1,
    }
    field = next((name for name, is_set in several.items() if is_set), None)
    if recipe.trainer.deterministic and field:
        raise ValueError(
            f"{field}: sums gradients in the order in which devices are done; "
            "trainer.deterministic needs one device that trains"
        )


def _check_colocated(recipe: "Recipe") -> None:
    colocated = recipe.schedule.mode == "colocated"
    if not recipe.rollout.workers and not colocated:
        raise ValueError(
            'rollout.workers: 0 needs schedule.mode "colocated"; otherwise start at least 1'
        )
    if colocated and recipe.rollout.workers and not recipe.rollout.can_train:
        raise ValueError(
            'rollout.can_train: schedule.mode "colocated" trains on every device; set it to '
            "true, or rollout.workers to 0"
        )


def _check_ranks(recipe: "Recipe") -> None:
    trainer = recipe.trainer
    if trainer.ranks == 1:
        if trainer.sharded:
            raise ValueError("trainer.sharded: shares weights among ranks; set trainer.ranks to 2")
        return
    if trainer.devices > 1:
        raise ValueError("trainer.devices: every rank has one; set it to 1, or trainer.ranks to 1")
    if recipe.schedule.mode == "colocated":
        raise ValueError(
            'trainer.ranks: ranks do not generate, as schedule.mode "colocated" asks; set it to 1 '
            "(trainer.devices are several GPUs of one host)"
        )
    if trainer.sharded:
        check_divides(trainer.ranks, recipe.batch.group_size, "trainer.ranks", "batch.group_size")


def _check_updates(recipe: "Recipe") -> None:
    if recipe.trainer.updates == 1:
        return
    check_divides(recipe.trainer.updates, recipe.batch.groups, "trainer.updates", "batch.groups")
    if recipe.rollout.can_train:
        raise ValueError(
            "trainer.updates: rollout devices do not have the weights in between; set it to 1, or "
            "rollout.can_train to false"
        )
    if recipe.algorithm.advantage_std == "batch":
        raise ValueError(
            'trainer.updates: algorithm.advantage_std "batch" is known after the last group only; '
            'set it to 1, or advantage_std to "group"'
        )


def _check_full(recipe: "Recipe") -> None:
    if recipe.model.trained == "lora":
        return
    if recipe.model.dtype not in ("float32", "float64"):
        raise ValueError(
            f"model.dtype: all weights are trained in float32, not {recipe.model.dtype}; use "
            '"float32", or model.trained "lora"'
        )
    if recipe.algorithm.kl_beta:
        raise ValueError(
            "algorithm.kl_beta: the reference is the model without its adapter; set it to 0, or "
            'model.trained to "lora"'
        )
    if recipe.rollout.can_train:
        raise ValueError(
            "rollout.can_train: gradients of all weights are too large to send; set it to false"
        )


def check_messages(recipe: "Recipe") -> None:
    """A group with all its scores goes to the trainer as one message."""
    scorers, size = len(recipe.reward.scorers), recipe.batch.group_size
    if scorers > MAX_SCORERS:
        raise ValueError(f"reward.scorers: {scorers} are too many; at most {MAX_SCORERS}")
    fixed = recipe.schedule.fragment_size
    step = fixed if isinstance(fixed, int) else 1

    def fits(samples: int) -> bool:
        fragments = min(samples // step, MAX_FRAGMENTS_PER_GROUP)
        return group_bytes(samples, fragments, scorers) <= MAX_MESSAGE_BYTES

    if not fits(size):
        most = max(samples for samples in range(0, size, step) if fits(samples))
        raise ValueError(
            f"batch.group_size: {size} samples with {scorers} scores each are more than a message "
            f"takes; at most {most}, or fewer reward.scorers"
        )


def check_divides(part: int, whole: int, field: str, of: str) -> None:
    if whole % part == 0:
        return
    divisors = [value for value in range(1, whole + 1) if whole % value == 0]
    nearest = sorted(sorted(divisors, key=lambda value: abs(value - part))[:2])
    raise ValueError(
        f"{field}: {part} does not divide {of} ({whole}); nearest that do: "
        + " and ".join(str(value) for value in nearest)
    )


def check_at_most(value: int | str, limit: int, field: str, of: str) -> None:
    if isinstance(value, int) and value > limit:
        raise ValueError(f"{field}: {value} is more than {of}; at most {limit}")
