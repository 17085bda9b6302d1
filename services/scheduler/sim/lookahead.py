"""A look-ahead by simulation: how many groups of a batch the trainer had better generate.

The wave model (`tag.makespan`) takes the trainer's help for one block. In truth ready training goes
first, devices have work in hand, and what is left at the end goes where it is done first; so the
core itself is run in virtual time, with the costs that were learned, for a few numbers of groups
around the model's and for none.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from services.scheduler.core.device_queues import sample_seconds
from services.scheduler.core.lending import tag_inputs
from services.scheduler.core.state import LoanState, Plan, State, WorkerState
from services.scheduler.core.tag.controller import Controller
from services.scheduler.core.tag.estimates import Costs, Estimate
from services.scheduler.core.tag.makespan import best_groups
from services.scheduler.sim.cluster import Cluster, build
from services.scheduler.sim.measured import Watch, step_seconds
from services.scheduler.sim.profiled import NEVER, prime
from services.scheduler.sim.timing import Timing

REACH = 3
"""Groups to both sides of the wave model's choice."""

STEPS = 10
"""Denoising steps of a simulated fragment: a borrowed device can be called back after each."""

TRAINER = "trainer"
"""Kind of a trainer's independent devices, which are taken for equal."""

LEAD, MEASURED = 2, 4
"""Batches, with one-step asynchrony: until the lead is built up, and then."""


def look_ahead(plan: Plan, state: State, now: float) -> int | None:
    """The best number of groups for a batch like the current one; None if it cannot be told.

    For a batch from its opening on, whatever has happened in this one by ``now``. At most eight
    runs of one batch, or four of a few batches with one-step asynchrony. Of equal numbers, the
    smallest. Independent devices need none with one-step asynchrony.
    """
    trainer = state.trainer
    if trainer is None or not trainer.concurrency or plan.schedule.mode != "pipelined":
        return None
    if trainer.independent_devices and plan.schedule.staleness_limit:
        return None
    if state.tag.controller.mode != "auto" or not _is_known(state.costs):
        return None
    first = best_groups(tag_inputs(plan, state, trainer))
    pace = REACH if plan.schedule.staleness_limit else 1
    near = range(first - REACH, first + REACH + 1, pace)
    best, least = 0, math.inf
    for groups in sorted({0, *near}, key=lambda k: (abs(k - first), k)):
        if 0 <= groups <= plan.num_groups:
            seconds = batch_seconds(plan, state, groups, at_most=least)
            if seconds < least or (seconds == least and groups < best):
                best, least = groups, seconds
    return best if math.isfinite(least) else None


def batch_seconds(plan: Plan, state: State, groups: int, *, at_most: float = math.inf) -> float:
    """What a batch takes if the trainer may generate so many of its groups.

    Infinite if it never ends, or if, on-policy, that is clearly more than ``at_most``.
    """
    if plan.schedule.staleness_limit:
        watch = Watch(cluster_of(plan, state, groups, batches=LEAD + MEASURED + 1), LEAD + MEASURED)
        if not watch.cluster.world.run(NEVER, watch.is_done):
            return math.inf
        return step_seconds(watch, LEAD, _generation_seconds(plan, state, groups))
    cluster = cluster_of(plan, state, groups)
    commits = cluster.history.commit_times
    in_time = cluster.world.run(min(at_most + 1e-6, NEVER), lambda: bool(commits))
    return commits[0] if in_time else math.inf


def _generation_seconds(plan: Plan, state: State, groups: int) -> float:
    """Returns seconds in which all devices that may generate generate a batch."""
    trainer = state.trainer
    devices = [*state.rollout, trainer] if trainer is not None and groups else state.rollout
    rate = sum(worker.concurrency / sample_seconds(state, worker) for worker in devices)
    return plan.num_groups * plan.group_size / rate


def _is_known(costs: Costs) -> bool:
    known = (costs.help_seconds(), costs.train.value, costs.ready.value, costs.commit.value)
    return all(value is not None for value in known)


def cluster_of(plan: Plan, state: State, groups: int, *, batches: int = 1) -> Cluster:
    """Makes a simulated cluster of the devices at hand, each as fast as it was seen to be."""
    trainer, costs = state.trainer, state.costs
    assert trainer is not None
    devices = {
        f"{place}-{slot}": worker
        for place, worker in enumerate(state.rollout)
        for slot in range(worker.concurrency)
    }
    seconds = {kind: costs.rollout_seconds(w.address) or 1.0 for kind, w in devices.items()}
    mode = Controller(mode="fixed", groups=groups) if groups else Controller(mode="off")
    cluster = build(
        replace(
            plan,
            num_batches=batches,
            loan_seconds=NEVER,
            prompts=replace(plan.prompts, curriculum=None),  # nothing is learned here
        ),
        _timing(plan, costs, trainer, seconds),
        rollout=dict.fromkeys(devices, 1),
        trainer_slots=trainer.concurrency,
        reward_workers=plan.num_groups * plan.group_size,
        first_state=State(recovering=True, tag=LoanState(controller=mode)),
        lanes=(TRAINER,) * trainer.concurrency if trainer.independent_devices else (),
    )
    rollout = {kind: Estimate(value=each) for kind, each in seconds.items()}
    prime(cluster, replace(costs, rollout=rollout))
    return cluster


def _timing(plan: Plan, costs: Costs, trainer: WorkerState, seconds: Mapping[str, float]) -> Timing:
    """Every rollout device is a kind of its own. ``seconds``: of a sample."""
    help_seconds = costs.help_seconds() or 1.0
    rollout = {**seconds, TRAINER: help_seconds}
    group = costs.train.seconds * trainer.concurrency  # on one of the trainer's devices
    return Timing(
        fragment=lambda kind, samples: rollout[kind] * costs.whole_samples(samples),
        gradient=lambda _, samples: group * samples / plan.group_size,
        help=lambda samples: help_seconds * costs.whole_samples(samples),
        score=lambda _: costs.ready.seconds,
        train=lambda _: costs.train.seconds,
        commit=costs.commit.seconds,
        adopt=0.0,
        trained_steps=plan.trained_steps if plan.merged_steps else 1,
        merged_steps=plan.merged_steps,
        merged_part=_merged_part(plan),
        steps=STEPS,
        switch=costs.switch.seconds,
    )


def _merged_part(plan: Plan) -> float:
    """The share of a group's rows that it computes once: how long each takes is not known."""
    apart = plan.group_size * (plan.trained_steps - plan.merged_steps)
    return plan.merged_steps / (plan.merged_steps + apart)
