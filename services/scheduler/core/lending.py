"""TAG: decides when the trainer's device generates, and when it returns.

For each batch the controller decides, from learned costs, how many groups the trainer may generate
at most. Within that, the device is lent while the trainer has nothing to train and the wait is
worth the switch, and called back as soon as a group is ready: ready training always goes first. A
trainer of independent devices, each with all weights, is lent for its whole share at once: each
device generates what it was given and then trains, on its own. What the device is to do is stated
under a loan number that only grows, so commands may arrive twice, late or out of order.
"""

from dataclasses import replace

from services.scheduler.core.device_queues import DeviceQueues, queue_of, sample_seconds
from services.scheduler.core.fragments import give_back_all
from services.scheduler.core.inputs import DeviceReported, TagRefined
from services.scheduler.core.state import (
    DECISIONS_KEPT,
    BatchState,
    LoanState,
    Plan,
    State,
    TagRecord,
    WorkerState,
)
from services.scheduler.core.supply import fragment_size, unissued_samples
from services.scheduler.core.tag.controller import Controller, decide, observe
from services.scheduler.core.tag.fluid import share_of
from services.scheduler.core.tag.makespan import TagInputs
from shared.messages.contracts import SetDevice, TagRequest
from shared.messages.workers import DeviceMode

RENEW_PART = 0.5
"""A loan is renewed when this part of its time has passed."""
WORTH_SWITCHES = 2
"""A device is lent if it would wait for this many switches: half of a loan or more is generation.
A whole fragment need not fit, since unfinished ones are kept for the next loan."""


def open_loans(plan: Plan, state: State, now: float) -> State:
    """Decide for the current batch, once, and measure the batch before."""
    batch, trainer, tag = state.batch, state.trainer, state.tag
    if batch is None or trainer is None or not trainer.concurrency:
        return state
    if tag.history and tag.history[-1].batch == batch.index:
        return state
    seen = tag_inputs(plan, state, trainer)
    met = tag_inputs(plan, replace(state, costs=state.costs.as_measured()), trainer)
    tag = _close_record(plan, tag, batch, met)
    controller, decision = decide(tag.controller, seen)
    if trainer.independent_devices and tag.controller.mode == "auto":
        groups = share_of(seen, one_step=plan.schedule.staleness_limit > 0)
        decision = replace(decision, groups=groups, reason="fluid")
    record = TagRecord(
        batch=batch.index, decision=decision, tag_inputs=seen, opened_at=batch.opened_at
    )
    tag = replace(
        tag,
        controller=controller,
        samples_left=decision.groups * plan.group_size,
        history=(*tag.history, record)[-DECISIONS_KEPT:],
    )
    return replace(state, tag=tag)


def refine(plan: Plan, state: State, event: TagRefined, _now: float) -> State:
    """Adopt another number of groups for the current batch, found by a look-ahead."""
    tag = state.tag
    if not tag.history or tag.history[-1].batch != event.batch:
        return state
    last = tag.history[-1]
    if last.decision.reason != "fluid":
        controller, decision = decide(tag.controller, last.tag_inputs, refined=event.groups)
    elif plan.schedule.staleness_limit:
        return state
    else:
        controller, decision = tag.controller, replace(last.decision, groups=event.groups)
    taken = last.decision.groups * plan.group_size - tag.samples_left
    record = replace(last, decision=decision)
    return replace(
        state,
        tag=replace(
            tag,
            controller=controller,
            samples_left=max(0, decision.groups * plan.group_size - taken),
            history=(*tag.history[:-1], record),
        ),
    )


def _close_record(plan: Plan, tag: LoanState, batch: BatchState, seen: TagInputs) -> LoanState:
    """Close the record of the batch before, whose version is out and whose costs are learned."""
    last = tag.history[-1] if tag.history else None
    if last is None or last.batch != batch.index - 1:
        return tag
    seconds = max(0.0, batch.opened_at - last.opened_at)
    helped = last.decision.groups * plan.group_size - tag.samples_left
    return replace(
        tag,
        controller=observe(tag.controller, seen, -(-helped // plan.group_size), seconds),
        history=(*tag.history[:-1], replace(last, seconds=seconds)),
    )


def tag_inputs(
    plan: Plan, state: State, trainer: WorkerState, size: int | None = None
) -> TagInputs:
    """The current batch as the model sees it, with learned costs, in fragments of its size or of
    another."""
    if size is None:
        queues = sum(w.concurrency for w in state.rollout) + trainer.concurrency
        size = fragment_size(plan, state, queues)
    costs = state.costs
    rollout = tuple(
        sample_seconds(state, worker) * costs.whole_samples(size)
        for worker in state.rollout
        for _ in range(worker.concurrency)
    )
    return TagInputs(
        groups=plan.num_groups,
        fragments_per_group=-(-plan.group_size // size),
        rollout=rollout,
        trainer_queues=trainer.concurrency,
        help=sample_seconds(state, trainer) * costs.whole_samples(size),
        train=costs.train.seconds,
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
    """Record what the trainer's device reports that it does."""
    trainer, number, mode = state.trainer, event.loan_number, event.mode
    tag, costs = state.tag, state.costs
    if trainer is None or trainer.address != event.address:
        return state
    if (number, mode) == tag.observed and (
        number < tag.loan_number or (number, mode) == (tag.loan_number, tag.mode)
    ):
        return state
    if (number, mode) == (tag.loan_number, tag.mode) != tag.observed:
        # There and back take equally long.
        costs = costs.observe("switch", 2 * (now - tag.stated_at))
    tag = replace(tag, observed=(number, mode))
    if number > tag.loan_number:  # stated by the scheduler before it was restarted
        tag = replace(tag, loan_number=number, mode=mode)
    elif number == tag.loan_number and mode == "train" and tag.mode == "generate":
        tag = replace(tag, mode="train")  # it came back by itself
    return replace(state, tag=tag, costs=costs)


def lend_or_return(plan: Plan, state: State, now: float) -> tuple[State, list[SetDevice]]:
    """State what the device is to do, if that has changed or a loan runs out."""
    trainer, tag = state.trainer, state.tag
    if trainer is None or not trainer.concurrency or state.recovering:
        return state, []
    wanted: DeviceMode = "generate" if _should_lend(plan, state, trainer, now) else "train"
    if wanted == tag.mode == "train":
        if trainer.independent_devices:
            return state, []  # it has no unfinished work
        return _hand_over_to_rollout(plan, state, trainer, now)
    if wanted == tag.mode and now < tag.lent_until - RENEW_PART * plan.loan_seconds:
        return state, []
    return _set_device(plan, state, trainer, wanted, now, keep=True)


def _should_lend(plan: Plan, state: State, trainer: WorkerState, now: float) -> bool:
    batch = state.batch
    if batch is None or state.phase != "running":
        return False
    if trainer.drained and not trainer.independent_devices:
        return False
    if trainer.independent_devices:
        has_share = state.tag.samples_left > 0 and not trainer.drained
        return (has_share and _has_unissued(plan, batch)) or bool(trainer.assigned)
    if has_ready(plan, batch, trainer):
        return False
    if batch.tally.sent == len(batch.groups):
        return False  # it commits
    unfinished = any(held.slot.batch == batch.index for held in trainer.assigned)
    if not unfinished and not (state.tag.samples_left and _has_unissued(plan, batch)):
        return False
    return state.tag.mode == "generate" or _is_worth_it(plan, state, now)


def has_ready(plan: Plan, batch: BatchState, trainer: WorkerState) -> bool:
    """Whether a group is ready for the trainer."""
    tally = batch.tally
    if plan.schedule.holds_groups and tally.sent < len(batch.groups):
        return False
    if not plan.schedule.deterministic:
        return tally.untrained(trainer.address) > 0
    for group in batch.groups:
        if group.sent and trainer.address not in group.trained_by:
            return True
        if not group.sent:
            return False
    return False


def _has_unissued(plan: Plan, batch: BatchState) -> bool:
    return unissued_samples(plan, batch, len(batch.groups)) > 0


def _is_worth_it(plan: Plan, state: State, now: float) -> bool:
    """Whether the wait for the next group is long enough for the switch."""
    switch = state.costs.switch.seconds
    return not switch or _next_ready(plan, state, now) - now > WORTH_SWITCHES * switch


def _next_ready(plan: Plan, state: State, now: float) -> float:
    """When the next group can be trained, by rollout workers alone."""
    batch = state.batch
    assert batch is not None
    queues = DeviceQueues(now)
    rate = sum(1 / queues.seconds(state, w) for w in state.rollout for _ in range(w.concurrency))
    if not rate:
        return now + plan.loan_seconds
    missing = min(
        plan.group_size
        - sum(f.num_samples for f in g.fragments if f.stage in ("generated", "scored"))
        for g in batch.groups
        if not g.sent
    )
    return now + missing / rate + state.costs.ready.seconds


def _hand_over_to_rollout(
    plan: Plan, state: State, trainer: WorkerState, now: float
) -> tuple[State, list[SetDevice]]:
    """Give what a returned device still holds to rollout, once rollout has nothing else to do."""
    batch = state.batch
    held = [h for h in trainer.assigned if batch is not None and h.slot.batch == batch.index]
    if not held or batch is None or _has_unissued(plan, batch):
        return state, []
    if all(worker.assigned for worker in state.rollout):
        return state, []
    samples = sum(h.num_samples for h in held)
    if has_ready(plan, batch, trainer) and not _is_rollout_sooner(
        state, batch, trainer, samples, now
    ):
        return state, []
    return _set_device(plan, state, trainer, "train", now, keep=False)


def _is_rollout_sooner(
    state: State, batch: BatchState, trainer: WorkerState, samples: int, now: float
) -> bool:
    """Whether rollout would finish it from the start before the trainer returns to it."""
    rate = sum(worker.concurrency / sample_seconds(state, worker) for worker in state.rollout)
    ready = sum(g.sent and trainer.address not in g.trained_by for g in batch.groups)
    back = ready * state.costs.train.seconds + state.costs.switch.seconds
    left = max(queue_of(state, trainer, now).free) - now
    return samples / rate < back + left


def _set_device(
    plan: Plan, state: State, trainer: WorkerState, mode: DeviceMode, now: float, *, keep: bool
) -> tuple[State, list[SetDevice]]:
    lent = plan.loan_seconds if mode == "generate" else 0.0
    tag = replace(
        state.tag,
        loan_number=state.tag.loan_number + 1,
        mode=mode,
        stated_at=now,
        lent_until=now + lent,
    )
    command = SetDevice(
        worker=trainer.address, loan_number=tag.loan_number, mode=mode, max_seconds=lent, keep=keep
    )
    state = replace(state, tag=tag)
    if not keep:
        state = give_back_all(state, trainer)
    return state, [command]
