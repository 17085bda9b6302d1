"""Decides which workers are members of a batch: alive, and with its version to the last bit."""

from services.scheduler.core.fluid.state import FluidState
from services.scheduler.core.state import State, WorkerState

MEMBER = "member"
"""What a trainer of a fluid run is called in the state: it generates as rollout does."""

TOGETHER_S = 0.5
"""Seconds that those who have stepped wait for the others."""


def may_step(state: State, worker: WorkerState) -> bool:
    """Whether the worker can train pieces of the open batch and take its step."""
    fluid = state.fluid
    if fluid is None or worker.service != MEMBER or worker.excluded is not None:
        return False
    if worker.address in fluid.out or worker.address in fluid.gone:
        return False
    held = fluid.holds.get(worker.address)
    if held is None or held.version != fluid.batch:
        return False
    return fluid.checksum is None or held.checksum == fluid.checksum


def members(state: State) -> list[WorkerState]:
    """Workers that could take the step of the open batch, in a fixed order."""
    found = [worker for worker in state.workers.values() if may_step(state, worker)]
    return sorted(found, key=lambda worker: worker.address)


def have_made(fluid: FluidState) -> list[str]:
    """Members that have made the provisional version, the committer's to the last bit."""
    step = fluid.step
    made = None if step is None else step.stepped.get(step.committer)
    if step is None or made is None:
        return []
    return [
        address
        for address, each in step.stepped.items()
        if each.policy == made.policy
        and each.checksum == made.checksum
        and address not in fluid.gone
    ]


def are_together(fluid: FluidState, now: float) -> bool:
    """Whether the next batch may be given out: to all that hold the total, or, after a while, to
    those that have stepped. Given to the first ones, it would be theirs alone."""
    step = fluid.step
    if step is None or step.stepped_at is None:
        return False
    missing = [a for a in step.holders if a not in step.stepped and a not in fluid.gone]
    return not missing or now - step.stepped_at > TOGETHER_S
