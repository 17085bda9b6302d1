"""A scheduler's state at the opening of a batch, as it is after some batches of a profile's run."""

from dataclasses import replace

from services.scheduler.core.fluid.fluid_state import FluidState
from services.scheduler.core.state import Plan, State, WorkerState, new_batch
from services.scheduler.core.tag.estimates import Costs, Estimate
from services.scheduler.core.workers import Loan, Workers
from services.scheduler.costs.profile import Profile
from services.scheduler.costs.split import Devices, Split
from services.scheduler.sim.profiled import make_timing, steady_plan
from shared.recipe.schedule import RunSchedule


def addresses(devices: Devices, of: str = "") -> dict[str, str]:
    """Return address -> kind of each device."""
    return {f"{of}{kind}-{n}": kind for kind, count in devices.items() for n in range(count)}


def _costs(profile: Profile, split: Split, size: int) -> Costs:
    timing, shape = make_timing(profile, split.trainer), profile.shape
    shared = Costs(shared_share=shape.shared_share, group_size=shape.group_size)
    whole = shared.whole_samples(size)

    def known(seconds: float) -> Estimate:
        return Estimate(value=seconds, count=3)

    rollout, members = addresses(split.rollout), addresses(split.trainer, "member-")
    return replace(
        shared,
        rollout={
            **{a: known(timing.fragment(k, size) / whole) for a, k in rollout.items()},
            **{a: known(timing.help(k, size) / whole) for a, k in members.items()},
        },
        gradient={a: known(timing.gradient(k, shape.group_size)) for a, k in members.items()},
        switch=known(0.0),
        ready=known(profile.rollout.handoff_seconds),
        commit=known(timing.step + timing.exchange + timing.publish),
    )


def opening(
    profile: Profile, split: Split, size: int, *, max_staleness: int = 0
) -> tuple[Plan, State]:
    """Return a batch at its beginning, in fragments of `size` samples, with all costs learned."""
    schedule = RunSchedule(tag=0, fragment_size=size, max_staleness=1 if max_staleness else 0)
    plan = steady_plan(profile.shape, batches=10, schedule=schedule)
    rollout = [
        WorkerState(address=address, name=address, service="rollout", concurrency=1, kind=kind)
        for address, kind in addresses(split.rollout).items()
    ]
    members = [
        WorkerState(
            address=address,
            name=address,
            service="member",
            concurrency=0,
            kind=kind,
            lent_concurrency=1,
            loan=Loan(),
        )
        for address, kind in addresses(split.trainer, "member-").items()
    ]
    state = State(
        phase="running",
        batches=(new_batch(plan, 3, 0.0),),
        fluid=FluidState(batch=3),
        workers=Workers({worker.address: worker for worker in [*rollout, *members]}),
        costs=_costs(profile, split, size),
    )
    return plan, state
