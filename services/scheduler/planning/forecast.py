"""Forecasts a batch on a split of devices, in a millisecond, by the scheduler's own formula."""

import math
from statistics import NormalDist

from services.scheduler.core.sizing import chosen_size
from services.scheduler.core.supply import fragment_sizes, full_size
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
from services.scheduler.planning.splits import Split
from services.scheduler.sim.profiled import (
    gradient_helpers,
    has_independent_devices,
    help_seconds,
    helpers,
    timing_of,
)
from services.scheduler.sim.steady import steady_plan
from shared.recipe.schedule import RunSchedule

HOPS_TO_TRAINING = 3
"""Messages from a fragment's end to its group's training: to reward, scheduler and trainer."""
HOPS_TO_GENERATION = 2
"""Messages from a new version to the first fragment by it: to the scheduler and to the device."""
HOPS_OF_FLUID = 6
"""Messages from the last piece of a batch to the first fragment of the next one on fluid devices:
the piece, the exchange, the sums, the step, who has taken it, and the fragment."""

RESULT_SECONDS, RESULT_SECONDS_EACH = 0.23e-3, 5.3e-8
"""CPU seconds of the scheduler for a result among many, with all that follows from it, and for each
device that there is: .25 ms were measured with 512 devices, .33 with 2,048, .44 with 4,096 (`python
-m bench growth --live`, on a core of a virtual machine)."""
PIECE_SECONDS, PIECE_SECONDS_EACH = 0.24e-3, 4.5e-7
"""The same for a piece that a fluid device has trained, with its part of exchange and step: .5 ms,
.9 and 2.1."""


def scheduler_seconds(
    profile: Profile, split: Split, schedule: RunSchedule, factor: int = 1
) -> float:
    """Return about how long a core of the scheduler is busy with a batch in fragments of a fixed
    size: a step takes no less, however many devices there are.

    ``factor``: number of times that there are as many devices and groups.
    """
    shape, devices = profile.shape, factor * sum(split.devices.values())
    fragments = shape.samples / (schedule.fixed_fragment or shape.group_size)
    members = sum(split.trainer.values()) if schedule.mode == "fluid" else 0
    pieces = factor * min(shape.most_pieces, fluid.PIECES_EACH * members)
    results = factor * (2 * fragments + (0 if members else shape.groups))  # generated, and scored
    result = RESULT_SECONDS + RESULT_SECONDS_EACH * devices
    return results * result + pieces * (PIECE_SECONDS + PIECE_SECONDS_EACH * devices)


def forecast(profile: Profile, split: Split, size: int, schedule: RunSchedule) -> Forecast:
    """Forecast a batch in fragments of `size` samples, with as much help as is best or fixed."""
    return core.forecast(situation_of(profile, split, size, schedule=schedule), schedule)


def largest_fragment(profile: Profile, split: Split, schedule: RunSchedule) -> int:
    """Return the most samples that a device generates at a time in a run that is open about it:
    what the scheduler chooses by these costs, or what it begins and probes with before it knows
    them."""
    if schedule.fixed_fragment is not None:
        return schedule.fixed_fragment
    shape = profile.shape
    sizes = fragment_sizes(shape.group_size)
    seconds = {size: forecast(profile, split, size, schedule).seconds for size in sizes}
    plan = steady_plan(shape, batches=1, schedule=schedule)
    both = sum(split.devices.values())
    lent = schedule.mode in ("fluid", "colocated") or schedule.lends_trainer
    first = full_size(plan, both if lent else sum(split.rollout.values()))
    probed = min(first + 1, shape.group_size) if first == 1 else first
    return max(chosen_size(seconds, shape.group_size) or 1, probed)


def situation_of(profile: Profile, split: Split, size: int, *, schedule: RunSchedule) -> Situation:
    """Describe a batch in fragments of `size` samples as the scheduler would see it."""
    if schedule.mode == "fluid":
        return _of_fluid(profile, split, size, ahead=schedule.staleness_limit > 0)
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


def _of_fluid(profile: Profile, split: Split, size: int, *, ahead: bool) -> Situation:
    """Describe it on fluid devices, the split's trainer, and others that only generate. Where
    generation is a step ahead, sums are exchanged beside it."""
    shape, hop = profile.shape, profile.rollout.handoff_seconds
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
        ),
    )
    pool = IndependentPool(
        tag_inputs=inputs,
        num_trainer=len(lanes),
        last=train * len(lanes) * last,
        gradient=(math.inf,) * len(others),
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
    able = gradient_helpers(profile, split.rollout, schedule)
    size, number, shape = profile.shape.group_size, sum(split.trainer.values()), profile.shape
    steps = shape.trained_steps if schedule.tsp else 1
    merged = shape.merged_steps if schedule.tsp else 0
    last = last_piece(size, steps, merged, merged_part(profile), shape.trained_share)
    return IndependentPool(
        tag_inputs=tag_inputs,
        num_trainer=number,
        last=tag_inputs.train * number * last,
        gradient=tuple(
            gradient_seconds(profile, kind, size) if kind in able else math.inf
            for kind, count in split.rollout.items()
            for _ in range(count)
        ),
        publish=publish,
    )
