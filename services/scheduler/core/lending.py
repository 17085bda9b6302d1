"""TAG: decides when members generate that only train otherwise, and when they return.

For each batch the controller decides, from learned costs, how many groups members may generate at
most. A member that trains alone is lent while it has nothing to train and the wait is worth the
switch, and called back as soon as a group is ready: ready training always goes first. Several
members are lent for their whole share at once: each generates what it was given and then trains, on
its own. A command to a member carries a loan number that only grows, so commands may arrive twice,
late or out of order.
"""

from collections.abc import Sequence
from dataclasses import replace

from services.scheduler import limits
from services.scheduler.core.device_queues import (
    DeviceQueues,
    forecast_queue,
    kept_busy,
    sample_seconds,
)
from services.scheduler.core.fluid.fluid_state import FluidState
from services.scheduler.core.fluid.members import updates_replace_version
from services.scheduler.core.fluid.pieces import trainable
from services.scheduler.core.fragments import give_back_all
from services.scheduler.core.inputs import DeviceReported
from services.scheduler.core.state import BatchState, Plan, State, TagRecord, TagState, WorkerState
from services.scheduler.core.tag.controller import Controller, decide, observe
from services.scheduler.core.tag.fluid import generated_share
from services.scheduler.core.tag.makespan import TagInputs
from services.scheduler.core.unissued import fragment_size, unissued_samples
from services.scheduler.core.workers import Loan
from shared.messages.contracts import SetDevice, TagRequest
from shared.messages.workers import DeviceMode

RENEW_PART = 0.5
"""A loan is renewed when this part of its time has passed."""
MIN_LOAN_SWITCHES = 2
"""A member is lent if it would wait for this many switches: half of a loan or more is generation.
A whole fragment need not fit, since unfinished ones are kept for the next loan."""

LoanCommands = tuple[State, list[SetDevice]]


def lendable(state: State) -> list[WorkerState]:
    """Return the members that can be lent, in the order in which they joined."""
    return [state.workers[address] for address in state.workers.roles.lendable]


def open_loans(plan: Plan, state: State, now: float) -> State:
    """Decide for the current batch, once, and measure the batch before."""
    batch, members, tag = state.batch, lendable(state), state.tag
    if batch is None or not members:
        return state
    if tag.history and tag.history[-1].batch == batch.index:
        return state
    inputs = tag_inputs(plan, state, members)
    met = tag_inputs(plan, replace(state, costs=state.costs.as_measured()), members)
    tag = _close_record(plan, tag, batch, met)
    controller, decision = decide(tag.controller, inputs)
    if len(members) > 1 and tag.controller.mode == "auto":
        groups = generated_share(inputs, one_step=plan.schedule.staleness_limit > 0)
        decision = replace(decision, groups=groups, reason="share")
    record = TagRecord(
        batch=batch.index, decision=decision, tag_inputs=inputs, opened_at=batch.opened_at
    )
    tag = replace(
        tag,
        controller=controller,
        samples_left=decision.groups * plan.group_size,
        history=(*tag.history, record)[-limits.MAX_KEPT_DECISIONS :],
    )
    return replace(state, tag=tag)


def _close_record(plan: Plan, tag: TagState, batch: BatchState, inputs: TagInputs) -> TagState:
    """Close the record of the batch before, whose version is out and whose costs are learned."""
    last = tag.history[-1] if tag.history else None
    if last is None or last.batch != batch.index - 1:
        return tag
    seconds = max(0.0, batch.opened_at - last.opened_at)
    helped = last.decision.groups * plan.group_size - tag.samples_left
    return replace(
        tag,
        controller=observe(tag.controller, inputs, -(-helped // plan.group_size), seconds),
        history=(*tag.history[:-1], replace(last, seconds=seconds)),
    )


def tag_inputs(
    plan: Plan, state: State, members: Sequence[WorkerState], size: int | None = None
) -> TagInputs:
    """Return the current batch as the model sees it, in fragments of its size or of another. A size
    is chosen as if no device waited for the version: large fragments would seem too quick."""
    rollout = kept_busy(state, (w for w in state.only_generate if w.version != -1))  # -1: none read
    waits = size is None
    trainer_queues = sum(member.lent_concurrency for member in members)
    if size is None:
        queues = sum(worker.concurrency for worker in rollout) + trainer_queues
        size = fragment_size(plan, state, queues)
    costs = state.costs
    samples = costs.whole_samples(size)
    helped = [sample_seconds(state, member) for member in members]
    return TagInputs(
        groups=plan.num_groups,
        fragments_per_group=-(-plan.group_size // size),
        rollout=tuple(
            sample_seconds(state, worker) * samples / (worker.share if waits else 1.0)
            for worker in rollout
            for _ in range(worker.concurrency)
        ),
        trainer_queues=trainer_queues,
        help=len(helped) / sum(1 / each for each in helped) * samples,
        train=costs.train_seconds([member.address for member in members]) or 0.0,
        switch=costs.switch.seconds,
        ready=costs.ready.seconds,
        commit=costs.commit.seconds,
    )


def tag_requested(_plan: Plan, state: State, request: TagRequest, _now: float) -> State:
    """Set the mode that an operator chose: from the next batch on, but off at once."""
    controller = Controller(mode=request.mode, groups=request.groups)
    samples = 0 if request.mode == "off" else state.tag.samples_left
    return replace(state, tag=replace(state.tag, controller=controller, samples_left=samples))


def device_reported(_plan: Plan, state: State, event: DeviceReported, now: float) -> State:
    """Record what a member reports that it is used for."""
    member, number, mode = state.workers.get(event.address), event.loan_number, event.mode
    if member is None or member.loan is None:
        return state
    loan, costs = member.loan, state.costs
    stated = loan.number, loan.mode
    if (number, mode) == loan.observed and (number < loan.number or (number, mode) == stated):
        return state
    if (number, mode) == stated != loan.observed:
        # There and back take equally long.
        costs = costs.observe("switch", 2 * (now - loan.stated_at))
    loan = replace(loan, observed=(number, mode))
    if number > loan.number:  # stated by the scheduler before it was restarted
        loan = replace(loan, number=number, mode=mode)
    elif number == loan.number and mode == "train" and loan.mode == "generate":
        loan = replace(loan, mode="train")  # it came back by itself
    return replace(state.with_worker(member.with_loan(loan, now)), costs=costs)


def lend_or_return(plan: Plan, state: State, now: float) -> LoanCommands:
    """State what members are to do, where that has changed or a loan runs out."""
    members = lendable(state)
    commands: list[SetDevice] = []
    if not members or state.fluid is None:
        return state, commands
    may_begin = _may_lend(plan, state, state.fluid, members, now)
    for member in members:
        assert member.loan is not None
        before, state = member.loan, _hand_over(plan, state, member, now, commands)
        if state.workers[member.address].loan is not before:
            continue
        wanted = _wanted(plan, state, member, is_alone=len(members) == 1, may_begin=may_begin)
        is_renewed = now < before.lent_until - RENEW_PART * plan.loan_seconds
        if wanted != before.mode or (wanted == "generate" and not is_renewed):
            state = _set_device(plan, state, member, wanted, now, commands)
    return state, commands


def _may_lend(
    plan: Plan, state: State, fluid: FluidState, members: Sequence[WorkerState], now: float
) -> bool:
    """Whether members may generate now at all."""
    batch = state.batch
    if batch is None or state.phase != "running" or fluid.step is not None:
        return False
    if fluid.update and updates_replace_version(plan, state):
        return False
    if len(members) > 1:
        return True
    is_generated = len(fluid.groups) == len(batch.groups)
    if trainable(plan, fluid) or fluid.exchange is not None or is_generated:
        return False
    is_lent = any(member.concurrency for member in members)
    return is_lent or _is_worth_it(plan, state, now)


def _wanted(
    plan: Plan, state: State, member: WorkerState, *, is_alone: bool, may_begin: bool
) -> DeviceMode:
    """Return what a member is to do."""
    batch, fluid = state.batch, state.fluid
    assert fluid is not None
    is_wanted = is_alone and (member.drained or member.address in fluid.queued)
    if not may_begin or batch is None or is_wanted:
        return "train"
    if any(assigned.slot.batch == batch.index for assigned in member.assigned):
        return "generate"
    is_free = member.address not in fluid.queued and not member.drained
    has_share = bool(state.tag.samples_left) and _has_unissued(plan, batch)
    return "generate" if is_free and has_share else "train"


def _has_unissued(plan: Plan, batch: BatchState) -> bool:
    return unissued_samples(plan, batch, len(batch.groups)) > 0


def _is_worth_it(plan: Plan, state: State, now: float) -> bool:
    """Whether the wait for the next group is long enough for the switch."""
    switch = state.costs.switch.seconds
    return not switch or _next_ready(plan, state, now) - now > MIN_LOAN_SWITCHES * switch


def _next_ready(plan: Plan, state: State, now: float) -> float:
    """When the next group can be trained, by rollout workers alone."""
    batch = state.batch
    assert batch is not None
    queues, rollout = DeviceQueues(now), state.only_generate
    rate = sum(1 / queues.seconds(state, w) for w in rollout for _ in range(w.concurrency))
    if not rate:
        return now + plan.loan_seconds
    missing = min(
        plan.group_size
        - sum(f.num_samples for f in g.fragments if f.stage in ("generated", "scored"))
        for g in batch.groups
        if not g.sent
    )
    return now + missing / rate + state.costs.ready.seconds


def _hand_over(
    plan: Plan, state: State, member: WorkerState, now: float, commands: list[SetDevice]
) -> State:
    """Give what a returned member still holds to rollout, once rollout has nothing else to do."""
    batch, rollout = state.batch, state.only_generate
    assigned = [h for h in member.assigned if batch is not None and h.slot.batch == batch.index]
    if member.concurrency or not assigned or batch is None or _has_unissued(plan, batch):
        return state
    if all(worker.assigned for worker in rollout):
        return state
    samples = sum(h.num_samples for h in assigned)
    if _has_pieces(plan, state, member) and not _is_rollout_sooner(state, member, samples, now):
        return state
    return _set_device(plan, state, member, "train", now, commands, keep=False)


def _has_pieces(plan: Plan, state: State, member: WorkerState) -> bool:
    fluid = state.fluid
    if fluid is None:
        return False
    return member.address in fluid.queued or bool(trainable(plan, fluid))


def _is_rollout_sooner(state: State, member: WorkerState, samples: int, now: float) -> bool:
    """Whether rollout would finish it from the start before the member returns to it."""
    fluid = state.fluid
    assert fluid is not None
    rate = sum(w.concurrency / sample_seconds(state, w) for w in state.only_generate)
    train = state.costs.gradient_seconds(member.address) or 0.0
    ready = len(fluid.groups) - len(fluid.trained)
    back = ready * train + state.costs.switch.seconds
    at_work = replace(member, concurrency=member.lent_concurrency)
    left = max(forecast_queue(state, at_work, now).free) - now
    return samples / rate < back + left


def _set_device(
    plan: Plan, state: State, member: WorkerState, mode: DeviceMode, now: float,
    commands: list[SetDevice], *, keep: bool = True,
) -> State:  # fmt: skip
    assert member.loan is not None
    seconds = plan.loan_seconds if mode == "generate" else 0.0
    number = member.loan.number + 1
    loan = Loan(number, mode, now, now + seconds, member.loan.observed)
    commands.append(
        SetDevice(
            worker=member.address, loan_number=number, mode=mode, max_seconds=seconds, keep=keep
        )
    )
    member = member.with_loan(loan, now)
    state = state.with_worker(member)
    return state if keep else give_back_all(state, member)
