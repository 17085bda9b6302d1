"""Issues the commands of a fluid run that follow from the state: (plan, state, now) -> commands.

Whole groups go to DG_TRAIN, pieces of them to members, the rounds decide about sums, and fragments
go to whoever has room. As soon as the committer has taken the step, members that made the same
version to the last bit begin the next batch with it, while it is stored and committed; groups of
that batch are trained once the record is known.
"""

from dataclasses import replace

from services.scheduler.core import exclusion
from services.scheduler.core.assign import Issued, assign
from services.scheduler.core.fluid.members import are_together, have_made, members
from services.scheduler.core.fluid.pieces import in_one_piece, train_pieces, whole_group
from services.scheduler.core.fluid.recovery import drop_lost_version
from services.scheduler.core.fluid.rounds import decide
from services.scheduler.core.gradients import ready_groups, train_command
from services.scheduler.core.state import Plan, State, new_batch
from services.scheduler.core.workers import Workers
from shared.messages.contracts import Command, TrainGroup

Commanded = tuple[State, list[Command]]


def command(plan: Plan, state: State, now: float) -> Commanded:
    """Issue what was not issued before."""
    state, sent = _send_groups(plan, state)
    commands: list[Command] = [*sent]
    if state.phase != "failed":
        state, decided = decide(plan, state, now)
        state, pieces = train_pieces(plan, state, now)
        commands += [*decided, *pieces]
    state = drop_lost_version(state)
    if state.phase != "running":
        return state, commands
    is_stepped = state.fluid is not None and state.fluid.step is not None
    state, issued = (_assign_next if is_stepped else assign)(plan, state, now)
    return state, [*commands, *issued]


def _only(workers: Workers, able: frozenset[str]) -> Workers:
    """These of the workers; all, with what is known of them, if these are all that generate."""
    if able >= workers.roles.places.keys():
        return workers
    return Workers({a: worker for a, worker in workers.items() if a in able})


def exclude_late_members(plan: Plan, state: State, now: float) -> State:
    """Give out again what a member has not trained in time, with all that is in its sum."""
    fluid = state.fluid
    if fluid is None or fluid.is_settled:
        return state
    able = {member.address for member in members(state)} if any(fluid.queues.values()) else set()
    for address, queue in fluid.queues.items():
        worker = state.workers.get(address)
        if not queue or worker is None or not able - {address}:
            continue  # a late one is better than none
        index, place = queue[0]
        since = max(fluid.groups[index].pieces[place].since, worker.clock_from)
        limit = exclusion.gradient_deadline(plan, state, worker) + max(
            (
                exclusion.fragment_deadline(plan, state, worker, held.num_samples)
                for held in worker.assigned[: worker.concurrency]
            ),
            default=0.0,
        )
        if worker.excluded == "late" or now - since > limit:
            fluid = replace(fluid.void(address), out=fluid.out | {address})
    return replace(state, fluid=fluid)


def _send_groups(plan: Plan, state: State) -> tuple[State, list[TrainGroup]]:
    """Send whole groups of the newest version's batch to be trained."""
    fluid, sent = state.fluid, list[TrainGroup]()
    if fluid is None or fluid.is_settled:
        return state, sent
    for ready in list(ready_groups(plan, state)):
        if ready.batch.index != fluid.batch:
            continue
        group = train_command(plan, ready)
        sent.append(group)
        cut = in_one_piece if group.dropped is not None else whole_group
        fluid = fluid.with_group(ready.index, cut(plan, group.attempt))
        state = state.with_group(ready.batch.index, ready.index, replace(ready.group, sent=True))
    return replace(state, fluid=fluid), sent


def _assign_next(plan: Plan, state: State, now: float) -> Issued:
    """Give fragments of the next batch to members that have made its version."""
    fluid = state.fluid
    assert fluid is not None
    made, following = fluid.provisional, fluid.batch + 1
    is_last = following >= plan.num_batches or state.goal_reached_by is not None
    if made is None or is_last or state.batch is None or not are_together(fluid, now):
        return state, []
    able = have_made(fluid)
    if not able & state.workers.with_room(plan.queue_depth):
        return state, []
    batch = state.find_batch(following) or new_batch(plan, following, now)
    view = replace(state, policy=made, batches=(batch,), workers=_only(state.workers, able))
    view, issued = assign(plan, view, now)
    if not issued:
        return state, []
    workers = state.workers.changed(view.workers.values())
    state = replace(state, batches=(state.batch, *view.batches), workers=workers)
    return state, issued
