"""Decides about sums: who exchanges them, when the step is taken, and who commits.

    all pieces trained -> ExchangeSums -> every sum held -> TakeStep -> Stepped -> commit record
           ^                   |                                |
           '---- missed -------'                                '-- all lost: the next attempt

Nothing here waits without an end: a member answers, or its lease ends, or a deadline passes.

With several updates per batch this goes round for each. Only the last update makes a version:
members with the same bits as the first one to step continue with the next update. On-policy, and
with shard groups, the first waits for the last fragment of the batch, since afterwards its version
is nowhere. If no remaining member has taken all updates so far, the batch is restarted from its
version.
"""

from dataclasses import replace

from services.scheduler import limits
from services.scheduler.core import participation
from services.scheduler.core.fluid.fluid_state import (
    ATTEMPTS_PER_EPOCH,
    ExchangeRound,
    FluidState,
    OrderedStep,
    begin_round,
    next_attempt,
    next_update,
)
from services.scheduler.core.fluid.levels import chosen_level
from services.scheduler.core.fluid.links import (
    MARGIN,
    bytes_to_exchange,
    choose_committer,
    is_by_store,
    max_seconds,
    seconds_to_leave,
    unmet,
)
from services.scheduler.core.fluid.members import are_together, members, updates_replace_version
from services.scheduler.core.fluid.modes import has_loans
from services.scheduler.core.fluid.places import group_members
from services.scheduler.core.fragments import fail_run
from services.scheduler.core.state import Plan, State
from shared.messages.fluid import (
    BeginAgain,
    CommitVersion,
    ExchangeSums,
    FluidCommand,
    Piece,
    Share,
    Stepped,
    TakeStep,
)
from shared.messages.records import ExchangeLevels

DecidedRound = tuple[State, list[FluidCommand]]


def decide(plan: Plan, state: State, now: float) -> DecidedRound:
    """Take the batch as far as it can go."""
    commands: list[FluidCommand] = []
    if state.fluid is None or state.policy is None or state.phase in ("failed", "finished"):
        return state, commands
    if state.fluid is not None and state.fluid.step is None:
        state = _end_round(plan, state, now, commands)
    if state.fluid is not None and state.fluid.step is None:
        state = _begin_round(plan, state, now, commands)
    state = _end_vain_run(_commit(plan, state, now, commands))
    return _tell_attempt(plan, state, commands), commands


def _end_vain_run(state: State) -> State:
    """Fail the run if too many attempts at the batch came to nothing although no process died."""
    fluid = state.fluid
    if fluid is None or fluid.num_vain < limits.MAX_BATCH_ATTEMPTS:
        return state
    reason = f"batch {fluid.batch} came to nothing {fluid.num_vain} times, although no process died"
    return fail_run(state, f"{reason}; {fluid.failure or 'members were late, or none committed'}")


def _tell_attempt(plan: Plan, state: State, commands: list[FluidCommand]) -> State:
    """Have members that have taken updates of an attempt that is over load the batch's version; and
    those that have made a version of which nothing is known any more."""
    fluid = state.fluid
    assert fluid is not None
    is_told = fluid.told_attempt >= fluid.attempt
    if is_told or (plan.updates == 1 and fluid.attempt < ATTEMPTS_PER_EPOCH):
        return state
    commands.insert(0, BeginAgain(batch=fluid.batch, attempt=fluid.attempt))
    return replace(state, fluid=replace(fluid, told_attempt=fluid.attempt))


def commit_seconds(plan: Plan, state: State, fluid: FluidState, committer: str) -> float:
    """Return the longest time from a step's order to the commit record."""
    own = plan.schedule.slot_deadline_s
    if own != "auto":
        return own
    leaves = MARGIN * seconds_to_leave(state, fluid, committer)
    return max(limits.COMMIT_TIMEOUT_S, 10 * state.costs.commit.seconds, leaves)


def _begin_round(plan: Plan, state: State, now: float, commands: list[FluidCommand]) -> State:
    """Have everybody exchange sums, once all of the update is in them."""
    fluid = state.fluid
    assert fluid is not None and state.policy is not None
    part = plan.part(fluid.update)
    if fluid.exchange is not None or len(fluid.trained) < part.stop:
        return state
    if _is_wanted_to_generate(plan, state, fluid):
        return state
    grouped = group_members(fluid, [each.address for each in members(state)])
    taking_part = grouped.addresses
    pieces: dict[str, list[Piece]] = {}
    for index in part:
        for each in fluid.groups[index].pieces:
            if each.worker is not None:
                pieces.setdefault(each.worker, []).append(each.piece)
    if not taking_part or not pieces.keys() <= set(taking_part):
        return _void_absent(state, fluid, pieces.keys() - set(taking_part))
    shares = tuple(
        Share(
            worker=address,
            sum_number=fluid.sum_number(address),
            pieces=tuple(pieces.get(address, ())),
        )
        for address in taking_part
    )
    size = bytes_to_exchange(plan, fluid, shares)
    committer = choose_committer(state, fluid, shares)
    others = [address for address in taking_part if address != committer]
    command = ExchangeSums(
        batch=fluid.batch, attempt=fluid.attempt, update=fluid.update, round=fluid.round,
        policy=state.policy, committer=committer, shares=shares,
        max_seconds=max_seconds(plan, state, size, grouped, committer),
        num_failures=fluid.num_failures, by_store=is_by_store(state, fluid, size, taking_part),
        hosts=grouped.hosts, sites=grouped.sites,
        up=chosen_level(plan, state, now, "up", others),
    )  # fmt: skip
    commands.append(command)
    fluid = replace(fluid, exchange=begin_round(command, now), round=fluid.round + 1)
    return replace(state, fluid=fluid, trained_at=now)


def _is_wanted_to_generate(plan: Plan, state: State, fluid: FluidState) -> bool:
    """Whether the version that an update would replace on members has fragments of the batch to
    generate there: lent members finish those that they have."""
    if fluid.update == plan.updates - 1 or not updates_replace_version(plan, state):
        return False
    if not has_loans(plan):
        return len(fluid.groups) < plan.num_groups
    lent = (state.workers[address] for address in state.workers.roles.lendable)
    return any(assigned.slot.batch == fluid.batch for each in lent for assigned in each.assigned)


def _void_absent(state: State, fluid: FluidState, absent: set[str]) -> State:
    """Give out again what is in sums of members that cannot step; those not heard since a restart
    of the scheduler have a lease that will end."""
    for address in sorted(absent & state.workers.keys()):
        fluid = fluid.invalidate_sum(address)
    return replace(state, fluid=fluid)


def _end_round(plan: Plan, state: State, now: float, commands: list[FluidCommand]) -> State:
    """Order the step if a member holds the round's total; else begin another round."""
    fluid = state.fluid
    assert fluid is not None
    exchange = fluid.exchange
    if exchange is None:
        return state
    silent = _silent(fluid, exchange)
    expired = now - exchange.since > exchange.command.max_seconds + limits.LAST_REPORT_S
    if silent and not expired:
        return state
    holder = _reference(fluid, exchange)
    if holder is not None:
        state = _order_step(plan, state, fluid, exchange, holder, now, commands)
        if fluid.update < plan.updates - 1:
            return state
        decided = participation.decide(plan, state)
        return state if decided is state else replace(decided, sizing=None)
    fluid = _void_missed(fluid, exchange, silent)
    fluid = replace(fluid, failure=unmet(plan, fluid, exchange, silent))
    state = replace(state, fluid=fluid)
    if fluid.num_failures < limits.MAX_ROUNDS:
        return state
    where = f"batch {fluid.batch}: {fluid.num_failures} exchanges came to nothing"
    return fail_run(state, f"{where}, one after another; {fluid.failure}")


def _silent(fluid: FluidState, exchange: ExchangeRound) -> frozenset[str]:
    """Members of the round that live and have not answered."""
    return exchange.silent - fluid.gone if fluid.gone else exchange.silent


def _void_missed(fluid: FluidState, exchange: ExchangeRound, silent: frozenset[str]) -> FluidState:
    """After a round without a total: exclude silent members, and restart sums that do not match
    their share. If all members have reported twice without a total, exclude the missing ones, but
    not the committer, which has answered."""
    fluid = replace(fluid, exchange=None, num_failures=fluid.num_failures + 1)
    others = {a for address, missing in exchange.missed.items() for a in missing if a != address}
    out, committer = set(silent), exchange.command.committer
    if not silent and fluid.num_failures > 1:
        out |= others - fluid.gone - {committer}
    if committer in others:  # it was too slow for their sums
        fluid = replace(fluid, tried=fluid.tried | {committer})
    own = {address for address, missing in exchange.missed.items() if address in missing}
    for address in sorted(out | own | (fluid.gone & set(exchange.members))):
        fluid = fluid.invalidate_sum(address)
    return replace(fluid, out=fluid.out | out)


def _reference(fluid: FluidState, exchange: ExchangeRound) -> str | None:
    """The member whose total is the one to step with: the committer's, if it is alive."""
    holders = [a for a in exchange.members if a in exchange.held and a not in fluid.gone]
    committer = exchange.command.committer
    return committer if committer in holders else next(iter(holders), None)


def _order_step(
    plan: Plan,
    state: State,
    fluid: FluidState,
    exchange: ExchangeRound,
    holder: str,
    now: float,
    commands: list[FluidCommand],
) -> State:
    total = exchange.held[holder]
    generating = [each.address for each in state.only_generate]
    down = chosen_level(plan, state, now, "down", generating)
    command = TakeStep(
        batch=fluid.batch, attempt=fluid.attempt, update=fluid.update, round=total.round,
        sum_id=total.sum_id,
        norm=total.norm, finite=total.finite, scale=total.scale, committer=holder, down=down,
    )  # fmt: skip
    commands.append(command)
    holders = tuple(
        a for a in exchange.members
        if a in exchange.held and exchange.held[a].sum_id == total.sum_id
    )  # fmt: skip
    step = OrderedStep(command=command, since=now, holders=holders)
    fluid = replace(fluid, step=step, num_failures=0, tried=frozenset())
    levels = ExchangeLevels(down=down, up=exchange.command.up)
    return replace(state, fluid=fluid, levels=levels)


def _commit(plan: Plan, state: State, now: float, commands: list[FluidCommand]) -> State:
    """Name a member to commit the step; if no member can, train the batch again."""
    fluid = state.fluid
    assert fluid is not None
    step = fluid.step
    if step is None:
        is_rare = bool(fluid.out or fluid.former or fluid.update)
        return _stuck(plan, state, fluid, now, commands) if is_rare else state
    expired = now - step.since > commit_seconds(plan, state, fluid, step.committer)
    if fluid.update < plan.updates - 1:
        return _go_on(plan, state, fluid, step, now, commands, expired=expired)
    if step.committer not in fluid.gone and not expired:
        return state
    able = [a for a in step.holders if a in step.stepped and a not in fluid.gone]
    max_named = limits.MAX_COMMIT_ATTEMPTS * len(step.holders)
    in_vain = fluid.named >= max_named and _could_train(state, fluid)
    others = [a for a in able if a != step.committer] or able
    if others and not in_vain:
        return _name(state, fluid, _next_after(step, others), fluid.attempt, now, commands)
    waits = [a for a in step.holders if a not in fluid.gone and a not in step.stepped]
    if waits and not expired:
        return state
    return _retrain_batch(plan, state, fluid, now, commands)


def _could_train(state: State, fluid: FluidState) -> bool:
    """Whether any member could train the batch after a restart."""
    begun = replace(state, fluid=next_attempt(fluid, fluid.attempt + 1))
    return bool(members(begun if fluid.update else state))


def _go_on(
    plan: Plan, state: State, fluid: FluidState, step: OrderedStep, now: float,
    commands: list[FluidCommand], *, expired: bool,
) -> State:  # fmt: skip
    """Begin the next update once all members, or all that could, have taken the step. If no member
    has, restart the batch."""
    able = [a for a in step.holders if a in step.stepped and a not in fluid.gone]
    waits = [a for a in step.holders if a not in step.stepped and a not in fluid.gone]
    is_known = step.committer in able or step.committer in fluid.gone or expired
    if able and is_known and are_together(fluid, now):
        first = step.committer if step.committer in able else able[0]
        checksum = step.stepped[first].checksum
        following = next_update(fluid, plan.part(fluid.update), checksum)
        return replace(state, fluid=following)
    if able or (waits and not expired):
        return state
    return _retrain_batch(plan, state, fluid, now, commands)


def _next_after(step: OrderedStep, able: list[str]) -> str:
    """The next one in the order of the shares, so that each is named in the end."""
    places = {address: place for place, address in enumerate(step.holders)}
    here = places.get(step.committer, -1)
    return min(able, key=lambda a: (places[a] <= here, places[a]))


def _name(
    state: State, fluid: FluidState, address: str, attempt: int, now: float,
    commands: list[FluidCommand],
) -> State:  # fmt: skip
    command = CommitVersion(batch=fluid.batch, attempt=attempt, number=fluid.named, worker=address)
    commands.append(command)
    fluid = replace(fluid, named=fluid.named + 1)
    if fluid.step is not None and attempt == fluid.attempt:
        fluid = replace(fluid, step=fluid.step.with_committer(command, now))
    return replace(state, fluid=fluid)


def _retrain_batch(
    plan: Plan, state: State, fluid: FluidState, now: float, commands: list[FluidCommand]
) -> State:
    """All members that have stepped are lost: train the batch again, if any member could."""
    if fluid.num_given_up + 1 >= limits.MAX_BATCH_ATTEMPTS:
        lost = f"batch {fluid.batch} lost all that had taken its step {fluid.num_given_up} times"
        return fail_run(state, lost)
    state = replace(state, fluid=next_attempt(fluid, fluid.attempt + 1))
    if fluid.update or members(state):  # whoever has taken updates goes back before them
        return state
    return _stuck(plan, replace(state, fluid=fluid), fluid, now, commands)


def _stuck(
    plan: Plan, state: State, fluid: FluidState, now: float, commands: list[FluidCommand]
) -> State:
    """If no member can train, a member that stepped in an earlier attempt may commit that step.
    Else excluded members are readmitted under the next attempt, and all members if the updates so
    far are lost."""
    if members(state):
        return state if fluid.alone_since is None else _known_alone(state, fluid, None)
    if fluid.update:
        return _without_updates(state, fluid, now)
    stepped = fluid.step.stepped if fluid.step else {}
    steps = {a: each for a, each in stepped.items() if each.policy.version > fluid.batch}
    former: dict[str, Stepped] = {**fluid.former, **steps}
    alive = [a for a in former if a in state.workers]
    named = fluid.former_named
    address = sorted(alive)[fluid.named % len(alive)] if alive else ""
    if alive and (named is None or now - named > commit_seconds(plan, state, fluid, address)):
        attempt = former[address].attempt
        return _name(state, replace(fluid, former_named=now), address, attempt, now, commands)
    if alive or not fluid.out:
        return state
    begun = replace(state, fluid=next_attempt(fluid, fluid.attempt + 1))
    return begun if members(begun) else state


def _without_updates(state: State, fluid: FluidState, now: float) -> State:
    """Restart the batch if no member has taken the updates before this one. After a restart of the
    scheduler, members have some time to report their holdings."""
    since = fluid.alone_since
    if since is None:
        return _known_alone(state, fluid, now)
    if now - since <= limits.LAST_REPORT_S:
        return state
    return replace(state, fluid=next_attempt(fluid, fluid.attempt + 1))


def _known_alone(state: State, fluid: FluidState, since: float | None) -> State:
    return replace(state, fluid=replace(fluid, alone_since=since))
