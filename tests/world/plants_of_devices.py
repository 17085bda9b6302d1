"""Bugs of workers: of who generates, scores and trains."""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from services.scheduler.core.fluid import members
from services.scheduler.core.fluid.fluid_state import FluidState
from services.scheduler.core.state import State, WorkerState
from services.trainer.batch import fetcher
from services.trainer.engine.storing import store_sets
from services.trainer.fluid import committing
from services.trainer.fluid.ledger import Ledger
from services.trainer.fluid.pieces import DeviceWork
from services.trainer.fluid.rounds import Rounds
from services.trainer.fluid.state import MemberState
from services.trainer.fluid.versions import MemberVersions
from shared.bus.queue import Delivery
from shared.messages.contracts import ObjectRef
from tests.world.draws import Draw
from tests.world.plants import (
    all_of,
    anywhere,
    has_updates,
    is_patient,
    is_stale,
    lends,
    patched,
    plant,
)


def keeps_old_policy(drawn: Draw) -> bool:
    return drawn.lags


@plant(keeps_old_policy)
def a_commit_names_only_what_samples() -> AbstractContextManager[None]:
    async def stored(*given: Any) -> tuple[ObjectRef, None]:
        trained, sampling = await store_sets(*given)
        return sampling or trained, None

    return patched((committing, "store_sets", stored))


_NOTHING = lambda *_, **__: None  # noqa: E731


@plant(anywhere, "kill")
def rewards_are_acknowledged_before_they_are_published() -> AbstractContextManager[None]:
    original = Delivery.__aenter__

    async def enter(self: Delivery) -> Any:
        await self._raw.ack()
        return await original(self)

    return patched((Delivery, "__aenter__", enter))


@plant(lends)
def a_kept_fragment_is_finished_with_the_next_version() -> AbstractContextManager[None]:
    return patched(
        (MemberState, "can_generate", lambda *_: True),
        (DeviceWork, "_weights_for", lambda *_: contextlib.nullcontext()),
    )


@plant(all_of(lends, is_patient), "kill")
def a_dropped_fragment_is_not_reported() -> AbstractContextManager[None]:
    return patched((DeviceWork, "_give_back", _NOTHING))


@plant(anywhere)
def members_admit_anything() -> AbstractContextManager[None]:
    return patched((fetcher, "check_admission", _NOTHING))


def _may_step_in_spite_of_all(state: State, worker: WorkerState) -> bool:
    fluid = state.fluid
    held = None if fluid is None else fluid.holds.get(worker.address)
    return fluid is not None and held is not None and held.version == fluid.batch


def _whoever_lives(state: State, worker: WorkerState) -> bool:
    return state.fluid is not None and worker.service == members.MEMBER


@plant(anywhere)
def a_share_is_counted_twice() -> AbstractContextManager[None]:
    """A sum that is not counted on any more goes into the exchange all the same."""
    original = FluidState.invalidate_sum

    def void(self: FluidState, address: str) -> FluidState:
        return replace(original(self, address), sums=self.sums)

    return patched(
        (FluidState, "invalidate_sum", void), (Ledger, "is_exactly", lambda *_: True),
        (members, "may_step", _may_step_in_spite_of_all),
    )  # fmt: skip


@plant(anywhere)
def a_sum_is_exchanged_whatever_is_in_it() -> AbstractContextManager[None]:
    """Members drop no sum, and none looks whether it has its share."""

    def advance(self: Ledger, key: Any) -> None:
        self.key = max(self.key, key)

    return patched((Ledger, "_advance", advance), (Ledger, "is_exactly", lambda *_: True))


@plant(anywhere)
def a_member_that_differs_goes_on() -> AbstractContextManager[None]:
    """It neither compares nor loads, and the scheduler does not look at checksums."""
    return patched(
        (MemberVersions, "compare", _NOTHING), (members, "may_step", _may_step_in_spite_of_all)
    )


@plant(anywhere)
def a_member_takes_a_second_sum() -> AbstractContextManager[None]:
    """It steps again with another total, from where it is."""

    async def stays(self: Rounds, message: Any) -> None:
        made = self._versions.made
        self._state.ledger.version = message.batch
        self._state.ledger.attempt, self._state.ledger.round = message.attempt, -1
        assert made is None or made.batch <= message.batch

    return patched((Rounds, "_go_back", stays), (members, "may_step", _whoever_lives))


@plant(anywhere)
def totals_of_older_rounds_are_taken() -> AbstractContextManager[None]:
    """A total is stepped with whatever it is made of."""

    def step(self: Ledger, message: Any) -> bool:
        return self._is_next(message)

    async def nothing(self: Rounds) -> None:
        self._round = None

    return patched((Ledger, "hear_step", step), (Rounds, "_end_round", nothing))


@plant(anywhere)
def gradients_are_taken_at_whatever_weights_there_are() -> AbstractContextManager[None]:
    original = DeviceWork._train

    async def train(self: DeviceWork, queued: Any) -> None:
        if self._state.policy is not None:
            there = queued.message.model_copy(update={"policy": self._state.policy})
            queued = replace(queued, message=there)
        await original(self, queued)

    ready = property(lambda self: bool(self._pieces) and self._pieces[0].group.done())
    return patched(
        (DeviceWork, "_train", train), (DeviceWork, "_has_piece", ready),
        (Ledger, "_is_next", lambda *_: True), (members, "may_step", _whoever_lives),
    )  # fmt: skip


@plant(is_stale)
def a_new_set_is_taken_in_the_middle_of_work() -> AbstractContextManager[None]:
    """A step's weights are used as soon as they are there, whatever the device is at."""

    async def take(self: Rounds, made: Any) -> None:
        if self._state.ahead is not None and self._state.ahead[0] == made.policy:
            self._use_what_is_made()

    return patched((Rounds, "_take", take))


@plant(is_stale)
def an_early_fragment_is_generated_by_the_new_version() -> AbstractContextManager[None]:
    """It says what it was told, and uses what is in use."""
    return patched((DeviceWork, "_weights_for", lambda *_: contextlib.nullcontext()))


@plant(has_updates)
def an_update_is_trained_at_the_weights_before() -> AbstractContextManager[None]:
    """Who has missed an update takes part in the next one all the same."""

    def is_next(self: Ledger, message: Any) -> bool:
        return bool(message.batch == self.version)

    return patched((Ledger, "_is_next", is_next), (members, "may_step", _may_step_in_spite_of_all))
