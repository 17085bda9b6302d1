"""A scheduler's state at the opening of a batch, as it is after some batches of a profile's run."""

from dataclasses import replace

from services.scheduler.core.state import Plan, State, WorkerState, new_batch
from services.scheduler.core.tag.estimates import Costs, Estimate
from services.scheduler.core.workers import Workers
from services.scheduler.costs.profile import Profile, fragment_seconds
from services.scheduler.costs.split import Split
from services.scheduler.sim.profiled import (
    has_independent_devices,
    help_seconds,
    helpers,
    steady_plan,
    timing_of,
)
from shared.recipe.schedule import RunSchedule


def _costs(profile: Profile, split: Split, size: int, addresses: dict[str, str]) -> Costs:
    timing = timing_of(profile, split.trainer)

    def known(seconds: float) -> Estimate:
        return Estimate(value=seconds, count=3)

    shape = profile.shape
    shared = Costs(shared_share=shape.shared_share, group_size=shape.group_size)
    return replace(
        shared,
        rollout={
            address: known(fragment_seconds(profile, kind, size) / shared.whole_samples(size))
            for address, kind in addresses.items()
        },
        help=known(help_seconds(profile, split.trainer, size) / shared.whole_samples(size)),
        train=known(timing.train(profile.shape.group_size)),
        switch=known(timing.switch),
        ready=known(profile.rollout.handoff_seconds),
        commit=known(timing.commit + timing.publish),
    )


def opening(
    profile: Profile, split: Split, size: int, *, max_staleness: int = 0
) -> tuple[Plan, State]:
    """Return a batch at its beginning, in fragments of `size` samples, with all costs learned."""
    schedule = RunSchedule(tag=0, fragment_size=size, max_staleness=1 if max_staleness else 0)
    plan = steady_plan(profile.shape, batches=10, schedule=schedule)
    addresses = {
        f"{kind}-{number}": kind for kind, count in split.rollout.items() for number in range(count)
    }
    rollout = [
        WorkerState(address=address, name=address, service="rollout", concurrency=1, kind=kind)
        for address, kind in addresses.items()
    ]
    trainer = WorkerState(
        address="trainer-1", name="trainer", service="trainer",
        concurrency=helpers(profile, split.trainer),
        independent_devices=has_independent_devices(profile, split.trainer),
    )  # fmt: skip
    state = State(
        phase="running",
        batches=(new_batch(plan, 3, 0.0),),
        workers=Workers({worker.address: worker for worker in [*rollout, trainer]}),
        costs=_costs(profile, split, size, addresses),
    )
    return plan, state
