"""Simulates members by a cost profile: all devices that train, beside others that only generate."""

from collections.abc import Mapping
from dataclasses import replace

from services.scheduler.core.state import first_state
from services.scheduler.core.tag.estimates import Estimate
from services.scheduler.costs import fluid
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import (
    Profile,
    fragment_seconds,
    gradient_seconds,
    merged_part,
    train_group_seconds,
)
from services.scheduler.sim.cluster import Cluster, build
from services.scheduler.sim.measured import Pools, Simulated, Watch, measure
from services.scheduler.sim.steady import NEVER, learned_overhead, steady_plan
from services.scheduler.sim.timing import Timing
from shared.recipe.schedule import RunSchedule

WARM_UP = 2
"""Batches until one is like the next: the first one begins on idle devices."""


def simulate_members(
    profile: Profile,
    *,
    rollout: Mapping[str, int],
    members: Mapping[str, int],
    schedule: RunSchedule,
    batches: int,
    warm_up: int | None,
    seed: int | None,
    causes: bool,
) -> Simulated:
    """Run so many batches, after those of the warm-up; see `sim.profiled.simulate`."""
    skipped = WARM_UP if warm_up is None else warm_up
    cluster = _cluster(profile, rollout, members, schedule, skipped + batches, seed)
    watch = Watch(cluster, skipped + batches, causes)
    if not cluster.world.run(NEVER, watch.is_done):
        raise RuntimeError(f"the simulated run stood still: {cluster.scheduler.state.failure}")
    together = {
        kind: rollout.get(kind, 0) + members.get(kind, 0) for kind in sorted({*rollout, *members})
    }
    size = schedule.fixed_fragment or profile.shape.group_size
    seconds = cluster.timing.fragment
    generating = together if schedule.members_generate else rollout
    rate = sum(n / seconds(kind, size) for kind, n in generating.items())
    pools = Pools(
        num_rollout=sum(rollout.values()),
        num_trainer=len(cluster.members),
        trainer_part=1.0,
        generation_seconds=profile.shape.samples / size / rate,
    )
    return measure(watch, skipped, pools, floor_seconds(profile, together))


def timing_of(
    profile: Profile, members: Mapping[str, int], schedule: RunSchedule, *, noise: bool
) -> Timing:
    """The profile's seconds. Scoring is part of a fragment's, as in the profile. Where members
    generate, a kind is of members or not; they hold the whole network, whatever others stream."""
    shape = profile.shape

    def fragment(kind: str, samples: int) -> float:
        is_member = schedule.members_generate and kind in members
        return fragment_seconds(profile, kind, samples, "trainer" if is_member else "rollout")

    slowest = max(members, key=lambda kind: fluid.snapshot_seconds(profile, kind))
    publish = profile.variant.publish_seconds
    return Timing(
        fragment=fragment,
        gradient=lambda kind, samples: gradient_seconds(profile, kind, samples),
        help=lambda _: 0.0,
        score=lambda _: 0.0,
        train=lambda _: 0.0,
        commit=0.0,
        publish=publish,
        states=fluid.commit_seconds(profile) - publish,
        adopt=profile.variant.adopt_seconds,
        trained_steps=shape.trained_steps,
        merged_steps=shape.merged_steps,
        merged_part=merged_part(profile),
        steps=shape.steps,
        noise=profile.rollout.noise_cv if noise else 0.0,
        piece=lambda kind, samples, steps: fluid.piece_seconds(profile, kind, samples, steps),
        exchange=fluid.exchange_seconds(profile, sum(members.values())),
        step=fluid.step_seconds(profile),
        snapshot=fluid.snapshot_seconds(profile, slowest),
        adopt_state=fluid.load_seconds(profile),
    )


def _of_shard_group(profile: Profile, devices: Mapping[str, int], timing: Timing) -> Timing:
    """The seconds of devices that share the weights and are one member: they divide the samples of
    a group, and each steps, copies and loads its part."""
    number, group = sum(devices.values()), train_group_seconds(profile, devices, tsp=False)
    return replace(
        timing,
        gradient=lambda _, samples: group * samples / profile.shape.group_size,
        piece=None,
        exchange=0.0,
        step=timing.step / number,
        snapshot=timing.snapshot / number,
        adopt_state=timing.adopt_state / number,
    )


def _cluster(
    profile: Profile,
    rollout: Mapping[str, int],
    members: Mapping[str, int],
    schedule: RunSchedule,
    batches: int,
    seed: int | None,
) -> Cluster:
    shape, hop = profile.shape, profile.rollout.handoff_seconds
    timing = timing_of(profile, members, schedule, noise=seed is not None)
    if profile.variant.sharded:
        timing = _of_shard_group(profile, members, timing)
        members = {next(iter(members)): 1}
    plan = steady_plan(shape, batches=batches + 1, schedule=schedule)
    cluster = build(
        plan, timing, rollout=rollout, trainer_slots=0, members=members, seed=seed or 0,
        delay=lambda: hop, first_state=first_state(plan),
    )  # fmt: skip
    size = schedule.fixed_fragment or shape.group_size
    costs = cluster.scheduler.state.costs.with_overhead(
        learned_overhead(profile, members if schedule.members_generate else rollout)
    )

    def sample(kind: str) -> Estimate:
        return Estimate(value=timing.fragment(kind, size) / costs.whole_samples(size))

    generating = {w.address: sample(w.kind) for w in cluster.rollout.values()}
    if schedule.members_generate:
        generating |= {w.address: sample(w.kind) for w in cluster.members.values()}
    training = {
        w.address: Estimate(value=timing.gradient(w.kind, shape.group_size))
        for w in cluster.members.values()
    }
    costs = replace(
        costs, rollout=generating, gradient=training, ready=Estimate(value=hop),
        commit=Estimate(value=timing.publish + timing.states),
    )  # fmt: skip
    cluster.scheduler.state = replace(cluster.scheduler.state, costs=costs)
    return cluster
