"""Forecasts a batch on a split of devices, in a millisecond, by the scheduler's own formula."""

import math
from collections.abc import Sequence
from dataclasses import replace

from services.scheduler.core.tag import forecast as core
from services.scheduler.core.tag.fluid import MemberPool
from services.scheduler.core.tag.forecast import Forecast, Situation, last_piece
from services.scheduler.core.tag.makespan import TagInputs
from services.scheduler.core.unissued import fragment_sizes as sizes_of
from services.scheduler.costs.capacity import training_role
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.seconds import fragment_seconds, merged_part
from services.scheduler.costs.split import Split
from services.scheduler.sim.profiled import make_timing, members_by_kind
from services.scheduler.sim.timing import Timing
from shared.recipe.schedule import RunSchedule

HOPS_TO_TRAINING = 3
"""Messages from a fragment's end to its group's training: to reward, scheduler and trainer."""
HOPS_TO_GENERATION = 6
"""Messages from the last piece of a batch to the first fragment of the next one:
the piece, the exchange, the sums, the step, who has taken it, and the fragment."""


def forecast(profile: Profile, split: Split, size: int, schedule: RunSchedule) -> Forecast:
    """Forecast a batch in fragments of `size` samples, with as much help as is best or fixed."""
    situation = opening_situation(profile, split, size, schedule=schedule)
    timing = _timing(profile, split, schedule)
    expected, shape = core.forecast(situation, schedule), profile.shape
    # Nothing is trained before the record of its version.
    record = timing.snapshot + timing.publish + timing.states
    training = shape.groups * situation.tag_inputs.train
    least = record + training + shape.updates * (timing.exchange + timing.step)
    return replace(expected, seconds=max(expected.seconds, least))


def fragment_sizes(profile: Profile, schedule: RunSchedule) -> list[int]:
    """Divisors of the group that one training message can name, or the one that is wanted."""
    if schedule.fixed_fragment is not None:
        return [schedule.fixed_fragment]
    return sizes_of(profile.shape.group_size)


def opening_situation(
    profile: Profile, split: Split, size: int, *, schedule: RunSchedule
) -> Situation:
    """Describe a batch in fragments of `size` samples as the scheduler would see it.

    Members are the split's trainer. If all members generate one step ahead, sums are exchanged
    concurrently. Others wait: on-policy generation for the weights, and training for the record one
    step ahead.
    """
    shape, hop, ahead = profile.shape, profile.rollout.handoff_seconds, schedule.staleness_limit > 0
    timing, lanes = _timing(profile, split, schedule), _lanes(profile, split, size, schedule)
    goes_on = ahead and schedule.mode == "fluid"
    publishing = 0.0
    if not schedule.members_generate:
        publishing = timing.publish + (timing.states if ahead else timing.adopt)
    generating = [seconds for seconds, _ in lanes if math.isfinite(seconds)]
    train = 1 / sum(1 / gradient for _, gradient in lanes)
    inputs = TagInputs(
        groups=shape.groups,
        fragments_per_group=-(-shape.group_size // size),
        rollout=tuple(
            seconds
            for kind, count in split.rollout.items()
            for seconds in [fragment_seconds(profile, kind, size)] * count
        ),
        trainer_queues=len(generating),
        help=len(generating) / sum(1 / each for each in generating) if generating else math.inf,
        train=train,
        switch=0.0,
        ready=HOPS_TO_TRAINING * hop,
        commit=shape.updates
        * (timing.step + (0.0 if goes_on else timing.exchange + HOPS_TO_GENERATION * hop))
        + publishing,
    )
    if schedule.mode == "disaggregated" and len(lanes) < 2:
        return Situation(inputs)
    return Situation(inputs, _member_pool(profile, inputs, lanes))


def _member_pool(
    profile: Profile, inputs: TagInputs, lanes: Sequence[tuple[float, float]]
) -> MemberPool:
    shape = profile.shape
    last = last_piece(
        shape.group_size, shape.trained_steps, shape.merged_steps, merged_part(profile),
        shape.trained_share,
    )  # fmt: skip
    return MemberPool(
        tag_inputs=inputs,
        num_trainer=len(lanes),
        last=inputs.train * len(lanes) * last,
        lanes=tuple(lane for lane in lanes if math.isfinite(lane[0])),
    )


def _timing(profile: Profile, split: Split, schedule: RunSchedule) -> Timing:
    return make_timing(profile, split.trainer, role=training_role(schedule))


def _lanes(
    profile: Profile, split: Split, size: int, schedule: RunSchedule
) -> list[tuple[float, float]]:
    """Return seconds of a fragment and of a group's gradient on each member. Where groups come
    while members wait for them, these train them in pieces of half a pass at first."""
    timing, shape = _timing(profile, split, schedule), profile.shape
    own = shape.trained_steps - shape.merged_steps
    rows, each_rows = shape.trained_rows(shape.group_size), max(own, shape.group_size // 2)

    def gradient(kind: str) -> float:
        whole = timing.gradient(kind, shape.group_size)
        if timing.piece is None or timing.ranks > 1 or schedule.mode != "disaggregated":
            return whole
        return max(whole, timing.piece(kind, each_rows) * rows / each_rows)

    return [
        each
        for kind, count in members_by_kind(profile, split.trainer).items()
        for each in [(timing.help(kind, size), gradient(kind))] * count
    ]
