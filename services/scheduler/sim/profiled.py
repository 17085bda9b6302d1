"""Simulates a schedule on a split of devices, by a cost profile.

Each device that trains is a member, or one rank of a shard group, which is a member: it takes
pieces of groups that are ready, and generates as its mode lets it.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from services.scheduler.core.state import first_state
from services.scheduler.core.tag.estimates import Estimate, Overhead, PassCosts
from services.scheduler.costs import fluid
from services.scheduler.costs.capacity import fits, pass_rows, training_role
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import Profile, Role
from services.scheduler.costs.seconds import fragment_seconds
from services.scheduler.sim.cluster import Cluster, build
from services.scheduler.sim.measured import ClusterWatch, SimulationResult, measure
from services.scheduler.sim.sites import Site
from services.scheduler.sim.steady import NO_EXPIRY_S, learned_overhead
from services.scheduler.sim.steady import steady_plan as steady_plan
from services.scheduler.sim.timing import Timing
from shared.errors import UserError
from shared.recipe.schedule import RunSchedule

Devices = Mapping[str, int]

MAX_ROWS = 64
"""Maximum fixed cost of a pass in rows: a host may take all of a pass's time."""
WARM_UP, WARM_UP_LENT, WARM_UP_ONE_STEP, WARM_UP_AUTO = 2, 1, 4, 8
"""Batches until one is like the next: the first one begins on idle devices. Where some devices only
generate, they build up their lead first with one-step asynchrony, and the controller of TAG looks
on before it acts."""


def simulate(
    profile: Profile,
    *,
    rollout: Devices,
    trainer: Devices,
    schedule: RunSchedule,
    sites: Sequence[Site] = (),
    sample_bytes: int = 1,
    batches: int = 8,
    warm_up: int | None = None,
    seed: int | None = 0,
    knows_costs: bool = True,
    observe: Callable[[ClusterWatch, int, float], None] = lambda *_: None,
) -> SimulationResult:
    """Run the warm-up and then this number of batches on these devices.

    ``sites``: more devices, each site behind a line. ``sample_bytes``: size of a stored sample.
    ``warm_up``: batches; None is what the schedule takes to settle. ``seed``: of the profile's
    noise; None leaves it out, and every batch is like the next. ``knows_costs``: whether the
    scheduler begins with the costs that it would learn. ``observe``: receives what `measure` does.

    Raises:
        UserError: a pool without devices, or one that cannot hold the model.
    """
    _check_pools(profile, rollout, trainer, schedule)
    skipped = num_warm_up_batches(schedule) if warm_up is None else warm_up
    cluster = _cluster(
        profile, rollout, trainer, schedule, skipped + batches, seed, sites, sample_bytes
    )
    if knows_costs:
        kinds = trainer if schedule.members_generate else rollout
        prime(cluster, learned_overhead(profile, kinds), profile.rollout.handoff_seconds)
    watch = ClusterWatch(cluster, skipped + batches)
    if not cluster.world.run(NO_EXPIRY_S, watch.is_done):
        raise RuntimeError(f"the simulated run stood still: {cluster.scheduler.state.failure}")
    generation = _generation_seconds(profile, cluster)
    observe(watch, skipped, generation)
    far = (Counter({site.kind: site.count}) for site in sites)
    devices = sum(far, Counter(rollout) + Counter(trainer))
    return measure(watch, skipped, generation, floor_seconds(profile, devices))


def num_warm_up_batches(schedule: RunSchedule) -> int:
    """Return how many batches are not measured."""
    if schedule.mode != "disaggregated":
        return WARM_UP
    if schedule.fixed_tag is None:
        return WARM_UP_AUTO
    return WARM_UP_ONE_STEP if schedule.staleness_limit else WARM_UP_LENT


def make_timing(
    profile: Profile, trainer: Devices, *, role: Role = "member", noise: bool = False
) -> Timing:
    """Return the profile's seconds. Scoring is part of a fragment's, as in the profile. Members
    hold the whole network, even if other devices stream it.

    ``role``: of the devices that train.
    """
    slowest = max(trainer, key=lambda kind: fluid.snapshot_seconds(profile, kind))
    publish = profile.variant.publish_seconds
    return Timing(
        fragment=lambda kind, samples: fragment_seconds(profile, kind, samples),
        help=lambda kind, samples: fluid.help_seconds(profile, kind, samples),
        gradient=lambda kind, samples: fluid.group_seconds(profile, kind, samples, role),
        score=lambda _: 0.0,
        publish=publish,
        states=fluid.commit_seconds(profile) - publish,
        adopt=profile.variant.adopt_seconds,
        steps=profile.shape.steps,
        noise=profile.rollout.noise_cv if noise else 0.0,
        piece=lambda kind, rows: fluid.piece_seconds(profile, kind, rows, role),
        pass_rows=lambda kind: pass_rows(profile, kind, role),
        ranks=profile.variant.ranks,
        gather=fluid.gather_seconds(profile),
        exchange=fluid.exchange_seconds(profile, sum(trainer.values())),
        step=fluid.step_seconds(profile),
        snapshot=fluid.snapshot_seconds(profile, slowest),
        adopt_state=fluid.load_seconds(profile),
        weights_bytes=round(1e9 * fluid.stored_gb(profile)),
        sum_bytes=round(1e9 * fluid.gradient_gb(profile)),
    )


def members_by_kind(profile: Profile, devices: Devices) -> Devices:
    """Return the members by kind that these devices form."""
    return {kind: count // profile.variant.ranks for kind, count in devices.items()}


def _check_pools(
    profile: Profile, rollout: Devices, trainer: Devices, schedule: RunSchedule
) -> None:
    _check_pool(profile, "member" if schedule.members_generate else "trainer", trainer)
    if rollout or not schedule.members_generate:
        _check_pool(profile, "rollout", rollout)


def _check_pool(profile: Profile, role: Role, devices: Devices) -> None:
    if not sum(devices.values()):
        raise UserError(f"no device for the {role}; every schedule here needs at least one")
    for kind, count in devices.items():
        reason = fits(profile, kind, role)
        if count and reason is not None:
            raise UserError(reason)
        if role != "rollout" and count % profile.variant.ranks:
            raise UserError(
                f"{count} {kind} are no shard groups of {profile.variant.ranks}; give a multiple"
            )


def _cluster(
    profile: Profile,
    rollout: Devices,
    trainer: Devices,
    schedule: RunSchedule,
    batches: int,
    seed: int | None,
    sites: Sequence[Site],
    sample_bytes: int,
) -> Cluster:
    hop = profile.rollout.handoff_seconds
    # The last batch that is measured is followed by another.
    plan = steady_plan(profile.shape, batches=batches + 1, schedule=schedule)
    timing = make_timing(profile, trainer, role=training_role(schedule), noise=seed is not None)
    return build(
        plan, replace(timing, sample_bytes=sample_bytes),
        rollout=rollout, members=members_by_kind(profile, trainer), sites=sites,
        seed=seed or 0, delay=hop, first_state=first_state(plan),
    )  # fmt: skip


def prime(cluster: Cluster, overhead: Overhead, ready: float) -> None:
    """Let the scheduler begin with costs that it would have learned.

    Args:
        ready: seconds from a fragment's end until it is scored.
    """
    costs = cluster.scheduler.state.costs.with_overhead(overhead)
    plan, timing = cluster.plan, cluster.timing
    size = plan.schedule.fixed_fragment or plan.group_size
    seconds = {each.address: timing.fragment(each.kind, size) for each in cluster.rollout.values()}
    for each in cluster.members.values():
        if math.isfinite(help_seconds := timing.help(each.kind, size)) and each.generates:
            seconds[each.address] = help_seconds
    whole = costs.whole_samples(size)
    line = Estimate(value=1e-9 / fluid.LINE_GB_PER_SECOND)
    home = {each.address: line for each in cluster.devices if cluster.sites and each.site is None}
    costs = replace(
        costs,
        rollout={address: Estimate(value=each / whole) for address, each in seconds.items()},
        gradient={
            each.address: Estimate(value=timing.gradient(each.kind, plan.group_size))
            for each in cluster.members.values()
        },
        passes=learned_passes(costs.passes, cluster),
        ready=Estimate(value=ready),
        commit=Estimate(value=timing.publish + timing.states),
        up=home,
        down=home,
    )
    cluster.scheduler.state = replace(cluster.scheduler.state, costs=costs)


def learned_passes(passes: PassCosts, cluster: Cluster) -> PassCosts:
    """Return what a run would learn of passes, of the kind of which most members are."""
    timing, kinds = cluster.timing, Counter(each.kind for each in cluster.members.values())
    if timing.piece is None or timing.pass_rows is None:
        return passes
    kind = max(kinds, key=lambda kind: kinds[kind])
    rows = timing.pass_rows(kind)
    if rows == 1:
        return passes
    one, whole = (timing.piece(kind, n) for n in (1, rows))
    each = max((whole - one) / (rows - 1), one / MAX_ROWS)
    return passes.with_overhead(Overhead.known_after(max(0.0, one / each - 1)))


def _generation_seconds(profile: Profile, cluster: Cluster) -> float:
    """Return the seconds in which all devices that may generate generate a batch."""
    size, timing = cluster.plan.schedule.fixed_fragment or profile.shape.group_size, cluster.timing
    members = Counter(each.kind for each in cluster.members.values() if each.generates)
    rollout = Counter(each.kind for each in cluster.rollout.values())
    rate = sum(
        rollout[kind] / timing.fragment(kind, size) + members[kind] / timing.help(kind, size)
        for kind in sorted({*rollout, *members})
    )
    return profile.shape.samples / size / rate
