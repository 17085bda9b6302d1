"""Forecasts a batch on a split of devices, in a millisecond, by the scheduler's own formula."""

from statistics import NormalDist

from services.scheduler.core.supply import fragment_sizes as sizes_of
from services.scheduler.core.tag import forecast as core
from services.scheduler.core.tag.fluid import IndependentPool
from services.scheduler.core.tag.forecast import Forecast, Situation, last_piece
from services.scheduler.core.tag.makespan import TagInputs
from services.scheduler.costs import fluid
from services.scheduler.costs.profile import (
    Profile,
    fragment_seconds,
    gradient_seconds,
    merged_part,
)
from services.scheduler.costs.split import Split
from services.scheduler.sim.profiled import (
    has_independent_devices,
    help_seconds,
    helpers,
    timing_of,
)
from shared.recipe.schedule import RunSchedule

HOPS_TO_TRAINING = 3
"""Messages from a fragment's end to its group's training: to reward, scheduler and trainer."""
HOPS_TO_GENERATION = 2
"""Messages from a new version to the first fragment by it: to the scheduler and to the device."""
HOPS_OF_FLUID = 6
"""Messages from the last piece of a batch to the first fragment of the next one on fluid devices:
the piece, the exchange, the sums, the step, who has taken it, and the fragment."""


def forecast(profile: Profile, split: Split, size: int, schedule: RunSchedule) -> Forecast:
    """Forecast a batch in fragments of `size` samples, with as much help as is best or fixed."""
    return core.forecast(situation_of(profile, split, size, schedule=schedule), schedule)


def fragment_sizes(profile: Profile, schedule: RunSchedule) -> list[int]:
    """Divisors of the group that one training message can name, or the one that is wanted."""
    if schedule.fixed_fragment is not None:
        return [schedule.fixed_fragment]
    return sizes_of(profile.shape.group_size)


def situation_of(profile: Profile, split: Split, size: int, *, schedule: RunSchedule) -> Situation:
    """Describe a batch in fragments of `size` samples as the scheduler would see it."""
    if schedule.has_members:
        return _of_members(profile, split, size, schedule)
    shape, hop = profile.shape, profile.rollout.handoff_seconds
    timing = timing_of(profile, split.trainer)
    alone = has_independent_devices(profile, split.trainer)
    overlapping = alone and schedule.staleness_limit
    publishing = timing.publish + timing.adopt + HOPS_TO_GENERATION * hop
    tag_inputs = TagInputs(
        groups=shape.groups,
        fragments_per_group=-(-shape.group_size // size),
        rollout=tuple(
            seconds
            for kind, count in split.rollout.items()
            for seconds in [fragment_seconds(profile, kind, size)] * count
        ),
        trainer_queues=helpers(profile, split.trainer),
        help=help_seconds(profile, split.trainer, size)
        if alone
        else _help_in_step(profile, split, size),
        train=timing.train(shape.group_size),
        switch=0.0 if alone else timing.switch,
        ready=HOPS_TO_TRAINING * hop,
        commit=timing.commit + (0.0 if overlapping else publishing),
    )
    if not alone:
        return Situation(tag_inputs)
    publish = publishing if overlapping else 0.0
    return Situation(tag_inputs, _pool(profile, split, schedule, tag_inputs, publish))


def _of_members(profile: Profile, split: Split, size: int, schedule: RunSchedule) -> Situation:
    """Describe it on members, the split's trainer, and others that only generate. Where generation
    is a step ahead, sums are exchanged beside it; where members do not generate, all wait for the
    weights."""
    shape, hop, ahead = profile.shape, profile.rollout.handoff_seconds, schedule.staleness_limit > 0
    publish = 0.0
    if not schedule.members_generate:
        publish = profile.variant.publish_seconds + profile.variant.adopt_seconds
    lanes = tuple(
        each
        for kind, count in split.trainer.items()
        for each in [(
            fragment_seconds(profile, kind, size, "trainer"),
            gradient_seconds(profile, kind, shape.group_size),
        )] * count
    )  # fmt: skip
    others = tuple(
        seconds
        for kind, count in split.rollout.items()
        for seconds in [fragment_seconds(profile, kind, size)] * count
    )
    train = 1 / sum(1 / gradient for _, gradient in lanes)
    last = last_piece(
        shape.group_size, shape.trained_steps, shape.merged_steps, merged_part(profile),
        shape.trained_share,
    )  # fmt: skip
    inputs = TagInputs(
        groups=shape.groups,
        fragments_per_group=-(-shape.group_size // size),
        rollout=others,
        trainer_queues=len(lanes),
        help=len(lanes) / sum(1 / seconds for seconds, _ in lanes),
        train=train,
        switch=0.0,
        ready=HOPS_TO_TRAINING * hop,
        commit=shape.updates
        * (
            fluid.step_seconds(profile)
            + (0.0 if ahead else fluid.exchange_seconds(profile, len(lanes)) + HOPS_OF_FLUID * hop)
        )
        + publish,
    )
    pool = IndependentPool(
        tag_inputs=inputs,
        num_trainer=len(lanes),
        last=train * len(lanes) * last,
        lanes=lanes,
    )
    return Situation(inputs, pool)


def _help_in_step(profile: Profile, split: Split, size: int) -> float:
    """The trainer's devices take denoising steps together, so the slowest sets the pace."""
    seconds = help_seconds(profile, split.trainer, size)
    number = helpers(profile, split.trainer)
    # Expected maximum of so many standard normal variables (Blom 1958).
    slowest = NormalDist().inv_cdf((number - 0.375) / (number + 0.25)) if number > 1 else 0.0
    return seconds * (1 + slowest * profile.rollout.noise_cv)


def _pool(
    profile: Profile, split: Split, schedule: RunSchedule, tag_inputs: TagInputs, publish: float
) -> IndependentPool:
    size, number, shape = profile.shape.group_size, sum(split.trainer.values()), profile.shape
    steps = shape.trained_steps if schedule.tsp else 1
    merged = shape.merged_steps if schedule.tsp else 0
    last = last_piece(size, steps, merged, merged_part(profile), shape.trained_share)
    return IndependentPool(
        tag_inputs=tag_inputs,
        num_trainer=number,
        last=tag_inputs.train * number * last,
        publish=publish,
    )
