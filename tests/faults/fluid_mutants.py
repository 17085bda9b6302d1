"""Planted bugs of fluid devices, which the checks have to find."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from services.scheduler.core import assign, fragments, gradients, issuing
from services.scheduler.core.fluid import (
    control,
    events,
    members,
    pieces,
    recovery,
    rounds,
)
from services.scheduler.core.fluid.state import FluidState
from services.scheduler.core.state import Plan, State, WorkerState
from services.scheduler.sim.fabric import Total
from services.scheduler.sim.members import SimMember
from shared.messages.contracts import GenerateFragment, PolicyPublished
from shared.messages.fluid import ExchangeSums, TakeStep
from tests.faults.planting import Mutant, patched


def a_share_is_counted_twice() -> AbstractContextManager[None]:
    """A sum that is not counted on any more goes into the exchange all the same."""
    original = FluidState.void

    def void(self: FluidState, address: str) -> FluidState:
        return replace(original(self, address), sums=self.sums)

    return patched(
        (FluidState, "void", void), (SimMember, "_is_other", lambda *_: False),
        (members, "may_step", _may_step_in_spite_of_all),
    )  # fmt: skip


def _may_step_in_spite_of_all(state: State, worker: WorkerState) -> bool:
    fluid = state.fluid
    held = None if fluid is None else fluid.holds.get(worker.address)
    return fluid is not None and held is not None and held.version == fluid.batch


def a_sum_is_exchanged_whatever_is_in_it() -> AbstractContextManager[None]:
    """Members drop no sum, and none looks whether it has its share."""

    def begin(self: SimMember, name: tuple[int, int, int, int]) -> bool:
        if name[0] > self.sum.name[0]:
            self.sum = type(self.sum)(name)
        return True

    return patched((SimMember, "_begin_sum", begin), (SimMember, "_is_other", lambda *_: False))


def a_step_is_ordered_before_all_have_confirmed() -> AbstractContextManager[None]:
    return patched((rounds, "_silent", lambda fluid, exchange: frozenset()))


def a_member_takes_a_second_sum() -> AbstractContextManager[None]:
    """It steps again with another total, from where it is."""

    def step(self: SimMember, command: TakeStep) -> None:
        self.made = None
        if self.holds is not None and self.holds.version == command.batch + 1:
            self.holds = self.holds.model_copy(update={"version": command.batch})
        original(self, command)

    def exchange(self: SimMember, command: ExchangeSums) -> None:
        if self.holds is not None:
            self.holds = self.holds.model_copy(update={"version": command.batch})
        original_exchange(self, command)

    original, original_exchange = SimMember._step, SimMember._exchange
    return patched(
        (SimMember, "_step", step), (SimMember, "_exchange", exchange),
        (SimMember, "_go_back", lambda *_: None),
        (members, "may_step", _whoever_lives),
    )  # fmt: skip


def _whoever_lives(state: State, worker: WorkerState) -> bool:
    fluid = state.fluid
    return fluid is not None and worker.service == members.MEMBER


def a_member_that_differs_goes_on() -> AbstractContextManager[None]:
    """It neither compares nor loads, and the scheduler does not look at checksums."""

    def begin(self: SimMember, task: GenerateFragment) -> None:
        self._generate(task)

    def published(self: SimMember, message: PolicyPublished) -> None:
        self.newest = max(self.newest, message.policy.version)

    return patched(
        (SimMember, "_compare", lambda *_: None), (SimMember, "_published", published),
        (SimMember, "_begin_fragment", begin),
        (members, "may_step", _may_step_in_spite_of_all),
    )  # fmt: skip


def what_a_lost_member_had_is_nobodys() -> AbstractContextManager[None]:
    def lost(state: State, address: str) -> State:
        return state

    return patched((events, "member_lost", lost))


def a_piece_keeps_its_number() -> AbstractContextManager[None]:
    original = pieces._given

    def given(state: State, fluid: FluidState, member: Any, key: Any, now: float) -> Any:
        group = fluid.groups[key[0]]
        number = group.pieces[key[1]].piece.number if group.pieces[key[1]].since < 0 else key[1]
        fluid = fluid.with_group(key[0], replace(group, next_number=number))
        return original(state, fluid, member, key, now)

    return patched((pieces, "_given", given))


def the_next_batch_is_trained_before_the_record() -> AbstractContextManager[None]:
    """Groups by a version that may be lost are trained."""
    original = control._send_groups

    def send(plan: Plan, state: State) -> Any:
        fluid = state.fluid
        if fluid is None or fluid.provisional is None or len(state.batches) < 2:
            return original(plan, state)
        sent = []
        for ready in list(gradients.ready_groups(plan, state)):
            if ready.batch.index == fluid.batch + 1:
                sent.append(gradients.train_command(plan, ready))
                group = replace(ready.group, sent=True)
                state = state.with_group(ready.batch.index, ready.index, group)
        return state, sent

    return patched((control, "_send_groups", send))


def what_a_lost_version_made_is_kept() -> AbstractContextManager[None]:
    """Groups of the next batch keep the version that was never committed."""

    def keep(state: State) -> State:
        return state

    return patched(
        (control, "drop_lost_version", keep), (recovery, "drop_lost_version", keep),
        (fragments, "drop_stale_groups", lambda plan, state: state),
    )  # fmt: skip


def nobody_else_commits() -> AbstractContextManager[None]:
    return patched((rounds, "_commit", lambda plan, state, now, commands: state))


def an_exchange_has_no_deadline() -> AbstractContextManager[None]:
    def ends(plan: Plan, state: State, now: float, commands: Any) -> State:
        return original(plan, state, 0.0, commands)

    original = rounds._end_round
    return patched((rounds, "_end_round", ends), (SimMember, "_expire", lambda *_: None))


def totals_of_older_rounds_are_taken() -> AbstractContextManager[None]:
    """A total is stepped with whatever it is made of."""
    original = SimMember._step

    def step(self: SimMember, command: TakeStep) -> None:
        if self.total is not None:
            command = command.model_copy(update={"sum_id": self.total.sum_id})
        original(self, command)

    def received(self: SimMember, total: Total) -> None:
        if self.total is None or self.total.command.batch != total.command.batch:
            original_received(self, total)
        else:
            kept, self.total = self.total, None
            original_received(self, total)
            self.total = kept

    original_received = SimMember.received
    return patched((SimMember, "_step", step), (SimMember, "received", received))


def gradients_are_taken_at_whatever_weights_there_are() -> AbstractContextManager[None]:
    return patched(
        (SimMember, "_is_at", lambda *_: True),
        (SimMember, "_go_back", lambda *_: None),
        (members, "may_step", _whoever_lives),
    )  # fmt: skip


def a_new_set_is_taken_in_the_middle_of_work() -> AbstractContextManager[None]:
    """A step's weights are used as soon as they are there, whatever the device is at."""
    original = SimMember._hold

    def hold(self: SimMember) -> None:
        if self.ahead is not None:
            self._take()
        original(self)

    return patched((SimMember, "_hold", hold))


def an_early_fragment_is_generated_by_the_new_version() -> AbstractContextManager[None]:
    """It says what it was told, and uses what is in use."""

    def weights(self: SimMember, task: GenerateFragment) -> str:
        assert self.policy is not None
        return self.policy.weights_digest

    return patched((SimMember, "_weights_for", weights))


def a_group_that_was_begun_early_goes_on_with_the_new_version() -> AbstractContextManager[None]:
    """Its next fragments are by whatever version is newest."""
    original = issuing.issue

    def issue(draft: Any, worker: WorkerState, found: Any) -> Any:
        group = draft.group(draft.begin(found.batch), found.group)
        if group.policy not in (None, draft.state.policy):
            draft.set_group(found.batch, found.group, replace(group, policy=draft.state.policy))
        return original(draft, worker, found)

    return patched((assign, "issue", issue))


def an_update_is_trained_at_the_weights_before() -> AbstractContextManager[None]:
    """Who has missed an update takes part in the next one all the same."""

    def is_at(self: SimMember, batch: int, update: int) -> bool:
        return self.policy is not None and self.policy.version == batch

    return patched((SimMember, "_is_at", is_at), (members, "may_step", _may_step_in_spite_of_all))


def nothing_begins_again() -> AbstractContextManager[None]:
    """Who has taken updates of an attempt that is over keeps them."""
    return patched((rounds, "_tell_attempt", lambda state, commands: state))


def who_only_generates_goes_on_before_there_is_anything_to_fetch() -> AbstractContextManager[None]:
    def able(state: State, fluid: FluidState) -> frozenset[str]:
        return members.have_made(fluid) | state.workers.roles.rollout

    return patched((control, "may_begin_next", able))


FLUID_MUTANTS: tuple[Mutant, ...] = (
    who_only_generates_goes_on_before_there_is_anything_to_fetch,
    an_update_is_trained_at_the_weights_before,
    nothing_begins_again,
    a_share_is_counted_twice,
    a_sum_is_exchanged_whatever_is_in_it,
    a_step_is_ordered_before_all_have_confirmed,
    a_member_takes_a_second_sum,
    a_member_that_differs_goes_on,
    what_a_lost_member_had_is_nobodys,
    a_piece_keeps_its_number,
    the_next_batch_is_trained_before_the_record,
    what_a_lost_version_made_is_kept,
    nobody_else_commits,
    an_exchange_has_no_deadline,
    totals_of_older_rounds_are_taken,
    gradients_are_taken_at_whatever_weights_there_are,
    a_new_set_is_taken_in_the_middle_of_work,
    an_early_fragment_is_generated_by_the_new_version,
    a_group_that_was_begun_early_goes_on_with_the_new_version,
)
