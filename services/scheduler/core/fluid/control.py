"""Issues the commands that follow from the state: (plan, state, now) -> (state, commands).

Whole groups go to DG_TRAIN, pieces of them to members, the rounds decide about sums, members are
lent or called back, and fragments go to workers with free capacity. As soon as the committer has
taken the step, members that made the same version to the last bit begin the next batch with it,
while it is stored and committed; devices that only generate follow once its weights are stored.
Groups of that batch are trained once the record is known.
"""

from dataclasses import replace
from functools import cache, partial

from services.scheduler.core import exclusion
from services.scheduler.core.assign import IssuedFragments, assign
from services.scheduler.core.fluid import batch_std
from services.scheduler.core.fluid.cutting import in_one_piece, whole_group
from services.scheduler.core.fluid.fluid_state import FluidState, next_attempt
from services.scheduler.core.fluid.members import MEMBER, are_together, may_begin_next, members
from services.scheduler.core.fluid.pieces import train_pieces
from services.scheduler.core.fluid.rounds import decide
from services.scheduler.core.fluid.stream_recovery import drop_lost_version
from services.scheduler.core.lending import lend_or_return, lendable, open_loans
from services.scheduler.core.ready_groups import ready_groups, train_command, waits_for_a_mend
from services.scheduler.core.state import Plan, State, WorkerState, new_batch
from services.scheduler.core.unissued import unissued_samples
from services.scheduler.core.workers import Workers
from shared.messages.contracts import Command, GenerateFragment, TrainGroup

Commanded = tuple[State, list[Command]]


def command(plan: Plan, state: State, now: float) -> Commanded:
    """Issue what was not issued before."""
    state, sent = _send_groups(plan, state)
    commands: list[Command] = [*sent]
    if state.phase != "failed":
        state, decided = decide(plan, state, now)
        state, lent = lend_or_return(plan, open_loans(plan, state, now), now)
        state, pieces = train_pieces(plan, state, now)
        commands += [*decided, *lent, *pieces]
    state = drop_lost_version(state)
    if state.phase != "running":
        return state, commands
    state, issued = _assign(plan, state, now)
    return state, [*commands, *issued]


def _only(workers: Workers, able: frozenset[str]) -> Workers:
    """These of the workers; all, with what is known of them, if these are all that generate."""
    if able >= workers.roles.places.keys():
        return workers
    return Workers({a: worker for a, worker in workers.items() if a in able})


def _assign(plan: Plan, state: State, now: float) -> IssuedFragments:
    if _is_next_batch_open(plan, state, now):
        return _assign_next(plan, state, now)
    batch = state.batch
    if not plan.schedule.members_generate or batch is None:
        return assign(plan, state, now)
    is_early = plan.early_groups and not unissued_samples(plan, batch, plan.num_groups)
    return _assign_early(plan, state, now) if is_early else assign(plan, state, now)


def _assign_early(plan: Plan, state: State, now: float) -> IssuedFragments:
    """Give fragments of the next batch, by the committed version, to devices that have no pieces of
    this one: those go first. While there may be more of them, one fragment at a time.

    Members take none that others would finish first: a batch would wait for it. Devices that only
    generate would have nothing else to do.
    """
    fluid = state.fluid
    if fluid is None:
        return assign(plan, state, now)
    is_trained = len(fluid.trained) == plan.num_groups
    depth = plan.queue_depth if is_trained else 1
    able = frozenset(state.workers.with_room(depth)) - fluid.queued
    if not able:
        return state, []
    plan = replace(plan, queue_depth=depth)
    training = frozenset(each for each in able if state.workers[each].service == MEMBER)
    issued: list[GenerateFragment] = []
    if training < able:
        view = replace(state, workers=_only(state.workers, able))
        view, issued = assign(plan, view, now, able - training)
        if issued:
            state = replace(view, workers=state.workers.changed(view.workers.values()))
    training_left = cache(partial(_training_left, plan, state, fluid))

    def delay(worker: WorkerState) -> float:
        """Return for how long a member that gets no fragment now trains before it may get one."""
        trains = worker.service == MEMBER and worker.address not in able
        return training_left() if trains else 0.0

    state, others = assign(plan, state, now, training, delay)
    return state, [*issued, *others]


def _training_left(plan: Plan, state: State, fluid: FluidState) -> float:
    """Return about how many seconds members train before the batch is done, if all take part."""
    left, costs = plan.num_groups - len(fluid.trained), state.costs
    able = state.members if left else ()
    rate = sum(1 / seconds for each in able if (seconds := costs.gradient_seconds(each.address)))
    return left / rate if rate else 0.0


def _without_early_groups(plan: Plan) -> Plan:
    """The plan as it is while the version that generates is not committed."""
    if not plan.early_groups:
        return plan
    return replace(plan, schedule=plan.schedule.model_copy(update={"max_staleness": 0}))


def exclude_late_members(plan: Plan, state: State, _event: object, now: float) -> State:
    """Give out again what a member has not trained in time, with all that is in its sum. If no
    other member is left, the excluded member is readmitted under the next attempt: a slow member is
    better than no member."""
    fluid = state.fluid
    if state.recovering or fluid is None or fluid.is_settled or not fluid.queued:
        return state
    able = {member.address for member in members(state)}
    for address in _late_members(plan, state, fluid, now):
        able.discard(address)
        if able:
            fluid = replace(fluid.invalidate_sum(address), out=fluid.out | {address})
            continue
        others = any(a in state.workers and a not in fluid.gone for a in fluid.out)
        if others or fluid.update:  # without them the updates before are lost
            fluid = replace(next_attempt(fluid, fluid.attempt + 1), out=frozenset({address}))
        break
    return replace(state, fluid=fluid)


def _late_members(plan: Plan, state: State, fluid: FluidState, now: float) -> list[str]:
    """Members that have not trained the first of their pieces in time."""
    addresses = []
    for address, queue in fluid.queues.items():
        worker = state.workers.get(address)
        if not queue or worker is None:
            continue
        index, place = queue[0]
        since = max(fluid.groups[index].pieces[place].since, worker.clock_from)
        limit = exclusion.gradient_deadline(plan, state, worker) + max(
            (
                exclusion.fragment_deadline(plan, state, worker, assigned.num_samples)
                for assigned in worker.assigned[: worker.concurrency]
            ),
            default=0.0,
        )
        if worker.excluded == "late" or now - since > limit:
            addresses.append(address)
    return addresses


def _send_groups(plan: Plan, state: State) -> tuple[State, list[TrainGroup]]:
    """Send whole groups of the newest version's batch to be trained."""
    fluid, sent = state.fluid, list[TrainGroup]()
    if fluid is None or (fluid.is_settled and fluid.update == plan.updates - 1):
        return state, sent
    waiting = [each for each in ready_groups(plan, state) if each.batch.index == fluid.batch]
    final = (
        batch_std.batch_advantages(plan, waiting[0].batch)
        if waiting and batch_std.is_batch_std(plan)
        else None
    )
    if batch_std.is_batch_std(plan) and final is None:
        return state, sent
    if final is not None and any(waits_for_a_mend(state, g) for g in waiting[0].batch.groups):
        return state, sent
    for ready in waiting:
        group = train_command(plan, ready)
        if final is not None:
            group = group.model_copy(update={"advantages": final[ready.index]})
        sent.append(group)
        cut = in_one_piece if group.dropped is not None else whole_group
        fluid = fluid.with_group(ready.index, cut(plan, group.attempt))
        state = state.with_group(ready.batch.index, ready.index, replace(ready.group, sent=True))
    return replace(state, fluid=fluid), sent


def _is_next_batch_open(plan: Plan, state: State, now: float) -> bool:
    """Whether fragments belong to the next batch, by the version that members have made. With
    one-step asynchrony, members still generate the committed batch until then."""
    fluid = state.fluid
    if fluid is None or fluid.step is None or fluid.update < plan.updates - 1:
        return False
    has_made = fluid.provisional is not None and are_together(fluid, now)
    return has_made or not plan.early_groups


def _assign_next(plan: Plan, state: State, now: float) -> IssuedFragments:
    """Assign fragments of the next batch to devices that have made its version or can fetch it.
    Fragments of the batch before are finished with the older version."""
    fluid = state.fluid
    assert fluid is not None
    policy, following = fluid.provisional, fluid.batch + 1
    is_last = following >= plan.num_batches or state.goal_reached_by is not None
    if policy is None or is_last or state.batch is None or not are_together(fluid, now):
        return state, []
    able = may_begin_next(state, fluid)
    plan = _leaving_shares(plan, state)
    if not able & state.workers.with_room(plan.queue_depth):
        return state, []
    batch = state.find_batch(following) or new_batch(plan, following, now)
    view = replace(state, policy=policy, batches=(batch,), workers=_only(state.workers, able))
    view, issued = assign(_without_early_groups(plan), view, now)
    if not issued:
        return state, []
    workers = state.workers.changed(view.workers.values())
    state = replace(state, batches=(state.batch, *view.batches), workers=workers)
    return state, issued


def _leaving_shares(plan: Plan, state: State) -> Plan:
    """Give one fragment at a time where several members will be lent for a share of the batch once
    it opens: what others have in store by then cannot be lent."""
    shares = len(lendable(state)) > 1 and state.tag.controller.mode != "off"
    return replace(plan, queue_depth=1) if shares else plan
