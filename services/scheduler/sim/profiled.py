"""Simulates a schedule on a split of devices, by a cost profile.

Devices that hold all weights each (LoRA) are independent: each generates what it was given, and
otherwise takes the next sample that is ready to be trained. If weights are sharded, all devices
train a group together. With TSP a rank takes (sample, step) rows on its own and exchanges gradients
in the batch's last backward pass only, so work is divided evenly. Without TSP one device trains all
steps of a sample: independent devices divide whatever samples are ready, of one group or of all of
the batch; ranks that share the weights those of one group at a time, so that 16 samples on 10
devices take as long as on 8.
"""

from collections.abc import Mapping
from dataclasses import replace

from services.scheduler.core.state import first_state
from services.scheduler.core.tag.estimates import Costs, Estimate
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import (
    Profile,
    Role,
    fits,
    fragment_seconds,
    gradient_seconds,
    merged_part,
    merged_row_seconds,
    speed,
    train_group_seconds,
)
from services.scheduler.sim.cluster import Cluster, build
from services.scheduler.sim.fluid import simulate_members
from services.scheduler.sim.measured import Pools, Simulated, Watch, measure
from services.scheduler.sim.scheduler import LookAhead
from services.scheduler.sim.steady import NEVER as NEVER
from services.scheduler.sim.steady import learned_overhead
from services.scheduler.sim.steady import steady_plan as steady_plan
from services.scheduler.sim.timing import Timing
from shared.errors import UserError
from shared.recipe.schedule import RunSchedule

Devices = Mapping[str, int]

WARM_UP_STRICT, WARM_UP_ONE_STEP, WARM_UP_AUTO = 0, 4, 8
"""Batches until one is like the next: a strict batch begins from nothing like any other, one-step
asynchrony builds up its lead first, and the controller of TAG looks on before it acts."""


def simulate(
    profile: Profile,
    *,
    rollout: Devices,
    trainer: Devices,
    schedule: RunSchedule,
    batches: int = 8,
    warm_up: int | None = None,
    seed: int | None = 0,
    look_ahead: LookAhead | None = None,
    causes: bool = True,
    knows_costs: bool = True,
) -> Simulated:
    """Run so many batches, after those of the warm-up, on these devices.

    ``warm_up``: batches; None is what the schedule takes to settle.
    ``seed``: of the profile's noise; None leaves it out, and every batch is like the next.
    ``causes``: whether to find out why devices wait, which takes a third more time.
    ``knows_costs``: whether the scheduler begins with the costs that it would learn.

    Raises:
        UserError: a pool without devices, or one that cannot hold the model.
    """
    _check_pool(profile, "trainer", trainer)
    if rollout or not schedule.members_generate:
        _check_pool(profile, "rollout", rollout)
    if schedule.has_members:
        return simulate_members(
            profile, rollout=rollout, members=trainer, schedule=schedule, batches=batches,
            warm_up=warm_up, seed=seed, causes=causes,
        )  # fmt: skip
    skipped = warm_up_of(schedule) if warm_up is None else warm_up
    cluster = _cluster(profile, rollout, trainer, schedule, skipped + batches, seed, look_ahead)
    if knows_costs:
        prime(cluster, _learned(profile, cluster, rollout, trainer, schedule))
    watch = Watch(cluster, skipped + batches, causes)
    if not cluster.world.run(NEVER, watch.is_done):
        raise RuntimeError(f"the simulated run stood still: {cluster.scheduler.state.failure}")
    pools = Pools(
        num_rollout=sum(rollout.values()),
        num_trainer=sum(trainer.values()),
        trainer_part=timing_of(profile, trainer).train(0) / cluster.timing.train(0),
        generation_seconds=_generation_seconds(profile, rollout, trainer, schedule),
    )
    bound = floor_seconds(profile, _together(rollout, trainer))
    return measure(watch, skipped, pools, bound)


def prime(cluster: Cluster, costs: Costs) -> None:
    """Let the scheduler begin with costs it would have learned. Those of rollout go by kind."""
    workers = cluster.rollout.values()
    rollout = {worker.address: costs.rollout[worker.kind] for worker in workers}
    costs = replace(costs, rollout=rollout)
    cluster.scheduler.state = replace(cluster.scheduler.state, costs=costs)


def warm_up_of(schedule: RunSchedule) -> int:
    """Returns how many batches are not measured."""
    if schedule.fixed_tag is None:
        return WARM_UP_AUTO
    return WARM_UP_ONE_STEP if schedule.staleness_limit else WARM_UP_STRICT


def timing_of(
    profile: Profile, trainer: Devices, *, tsp: bool = True, noise: bool = False
) -> Timing:
    """The profile's seconds. Scoring is part of a fragment's, as in the profile."""
    variant, shape = profile.variant, profile.shape
    rate = sum(count * speed(profile, kind, "trainer") for kind, count in trainer.items())
    even = profile.training_work / shape.groups / rate + _repeated(profile, trainer, rate)
    together = variant.sharded and not tsp
    group = train_group_seconds(profile, trainer, tsp=False) if together else even
    return Timing(
        fragment=lambda kind, samples: fragment_seconds(profile, kind, samples),
        gradient=lambda kind, samples: gradient_seconds(profile, kind, samples),
        help=lambda samples: help_seconds(profile, trainer, samples),
        score=lambda _: 0.0,
        train=lambda _: group,
        commit=shape.updates * variant.optimizer_seconds,
        publish=variant.publish_seconds,
        adopt=variant.adopt_seconds,
        trained_steps=shape.trained_steps,
        divides_steps=tsp,
        merged_steps=shape.merged_steps,
        merged_part=merged_part(profile),
        steps=shape.steps,
        switch=2 * variant.switch_seconds,
        noise=profile.rollout.noise_cv if noise else 0.0,
    )


def _repeated(profile: Profile, trainer: Devices, rate: float) -> float:
    """Returns seconds per group that ranks which share their weights take more than a fair share of
    its work: each has samples of its own, and computes for them the steps that a group shares."""
    merged = profile.shape.merged_steps * merged_row_seconds(profile)
    speeds = [speed(profile, kind, "trainer") for kind, count in trainer.items() if count]
    if not profile.variant.sharded or not merged or not all(speeds):
        return 0.0
    return merged / min(speeds) - merged / rate


def has_independent_devices(profile: Profile, trainer: Devices) -> bool:
    """Whether the trainer's devices work on their own."""
    return not profile.variant.sharded and sum(trainer.values()) > 1


def helpers(profile: Profile, trainer: Devices) -> int:
    """Training devices that can generate."""
    return sum(count for kind, count in trainer.items() if speed(profile, kind, "rollout"))


def help_seconds(profile: Profile, trainer: Devices, samples: int) -> float:
    """Returns seconds of a fragment on a trainer device; unequal ones count at their mean speed."""
    rates = [
        count / fragment_seconds(profile, kind, samples, "trainer")
        for kind, count in trainer.items()
        if count
    ]
    return helpers(profile, trainer) / sum(rates) if sum(rates) else float("inf")


def _check_pool(profile: Profile, role: Role, devices: Devices) -> None:
    if not sum(devices.values()):
        raise UserError(f"no device for the {role}; every schedule here needs at least one")
    for kind, count in devices.items():
        reason = fits(profile, kind, role)
        if count and reason is not None:
            raise UserError(reason)


def _cluster(
    profile: Profile,
    rollout: Devices,
    trainer: Devices,
    schedule: RunSchedule,
    batches: int,
    seed: int | None,
    look_ahead: LookAhead | None,
) -> Cluster:
    shape, hop = profile.shape, profile.rollout.handoff_seconds
    timing = timing_of(profile, trainer, tsp=schedule.tsp, noise=seed is not None)
    independent = has_independent_devices(profile, trainer)
    lanes = [kind for kind, n in trainer.items() for _ in range(n)] if independent else []
    slots = helpers(profile, trainer) if schedule.trainer_generates or independent else 0
    # The last batch that is measured is followed by another.
    plan = steady_plan(shape, batches=batches + 1, schedule=schedule)
    cluster = build(
        plan, timing, rollout=rollout, trainer_slots=slots, seed=seed or 0, delay=lambda: hop,
        first_state=first_state(plan),
        look_ahead=look_ahead,
        lanes=lanes,
    )  # fmt: skip
    return cluster


def _learned(
    profile: Profile, cluster: Cluster, rollout: Devices, trainer: Devices, schedule: RunSchedule
) -> Costs:
    """Returns what a run would learn; costs of rollout go by kind."""
    timing, hop = cluster.timing, profile.rollout.handoff_seconds
    size = schedule.fixed_fragment or profile.shape.group_size
    costs = cluster.scheduler.state.costs.with_overhead(
        learned_overhead(profile, rollout or trainer)
    )

    def each(seconds: float) -> Estimate:
        return Estimate(value=seconds)

    def sample(seconds: float) -> Estimate:
        return Estimate(value=seconds / costs.whole_samples(size))

    group = profile.shape.group_size
    return replace(
        costs,
        rollout={kind: sample(timing.fragment(kind, size)) for kind in rollout},
        help=sample(timing.help(size)) if cluster.trainer_slots else Estimate(),
        train=each(timing.train(group)),
        switch=each(0.0 if cluster.lanes else timing.switch),
        ready=each(hop),
        commit=each(timing.commit + (0.0 if schedule.staleness_limit else timing.publish)),
    )


def _generation_seconds(
    profile: Profile, rollout: Devices, trainer: Devices, schedule: RunSchedule
) -> float:
    """Returns seconds in which all devices that may generate generate a batch."""
    size = schedule.fixed_fragment or profile.shape.group_size
    devices = _together(rollout, trainer) if schedule.trainer_generates else rollout
    rate = sum(n / fragment_seconds(profile, kind, size) for kind, n in devices.items())
    return profile.shape.samples / size / rate


def _together(rollout: Devices, trainer: Devices) -> Devices:
    return {
        kind: rollout.get(kind, 0) + trainer.get(kind, 0) for kind in sorted({*rollout, *trainer})
    }
