"""Planted bugs of training: contributions, publication, independent devices, what is added up."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from services.scheduler.core import fragments, gradients, training
from services.scheduler.core.state import GroupState, State
from services.scheduler.sim import batches
from services.scheduler.sim.batches import Trainer
from services.scheduler.sim.devices import SimRollout
from services.scheduler.sim.independent_devices import IndependentTrainer, Lane, Share
from shared.messages.contracts import ComputeGradient, GradientComputed, Message, Policy, TrainGroup
from tests.faults import nemesis
from tests.faults.planting import Mutant, patched


def the_trainer_admits_anything() -> AbstractContextManager[None]:
    return patched((batches, "check_admission", lambda *_: None))


def the_trainer_trains_repeated_groups() -> AbstractContextManager[None]:
    original = Trainer._received

    def received(self: Trainer, message: Message) -> None:
        if isinstance(message, TrainGroup) and message.group in self._trained:
            del self._trained[message.group], self._ready[message.group]
        original(self, message)

    return patched((Trainer, "_received", received))


def a_contribution_that_comes_twice_is_added_twice() -> AbstractContextManager[None]:
    original = Trainer._received

    def received(self: Trainer, message: Message) -> None:
        assert isinstance(message, TrainGroup)
        if message.contribution is not None:
            self._trained.pop(message.group, None)
            self._ready.pop(message.group, None)
        original(self, message)

    return patched((Trainer, "_received", received))


def a_gradient_is_computed_with_whatever_weights_are_loaded() -> AbstractContextManager[None]:
    original = SimRollout._compute

    def compute(self: SimRollout, command: ComputeGradient) -> None:
        with patch.object(SimRollout, "_adopt", lambda self, policy: 0.0):
            original(self, command)

    return patched((SimRollout, "_compute", compute))


def a_contribution_of_another_version_is_accepted() -> AbstractContextManager[None]:
    original = training.gradient_computed

    def ask(*, group: TrainGroup, worker: str, **_: Any) -> ComputeGradient:
        return ComputeGradient(group=group, policy=group.policy, worker=worker)

    def computed(state: State, event: GradientComputed, now: float) -> State:
        return original(state, event.model_copy(update={"policy": state.policy}), now)

    return patched((gradients, "ComputeGradient", ask), (training, "gradient_computed", computed))


def a_contribution_outlives_its_fragments() -> AbstractContextManager[None]:
    def requeue_group(group: GroupState) -> GroupState:
        return replace(group, sent=False, attempt=group.attempt + 1)

    return patched((fragments, "requeue_group", requeue_group))


def a_dead_device_keeps_its_group() -> AbstractContextManager[None]:
    return patched((fragments, "cancel_gradient", lambda state, batch, index: state))


def a_released_gradient_is_computed_by_nobody() -> AbstractContextManager[None]:
    return patched((training, "cancel_gradient", lambda state, batch, index: state))


def a_gradient_is_computed_in_the_middle_of_a_fragment() -> AbstractContextManager[None]:
    def asked(self: SimRollout, message: Message) -> None:
        assert isinstance(message, ComputeGradient)
        self._compute(message)

    return patched((SimRollout, "_asked", asked))


def a_commit_does_not_wait_for_the_one_before() -> AbstractContextManager[None]:
    original = Trainer._commit

    def commit(self: Trainer) -> None:
        self._storing = False
        original(self)

    return patched((Trainer, "_commit", commit))


ZOMBIES = (("succeed trainer", nemesis.Nemesis.succeed_trainer),)
"""For bugs that are harmless without two trainers."""


def a_trainer_goes_on_from_a_version_that_was_refused() -> AbstractContextManager[None]:
    original = Trainer._stored

    def stored(self: Trainer, policy: Policy | None) -> None:
        original(self, self.policy if self._storing else policy)

    return patched((Trainer, "_stored", stored), (nemesis, "FAULTS", ZOMBIES))


def what_was_trained_beside_a_refused_version_is_kept() -> AbstractContextManager[None]:
    original = Trainer._begin_batch

    def begin(self: Trainer, policy: Policy, before: Policy | None) -> None:
        ready, trained = self._ready, self._trained
        again = self.version == policy.version
        original(self, policy, before)
        if again:
            self._ready, self._trained = ready, trained

    return patched((Trainer, "_begin_batch", begin), (nemesis, "FAULTS", ZOMBIES))


def slices_are_added_to_whatever_batch_is_next() -> AbstractContextManager[None]:
    def occupy(
        self: IndependentTrainer, lane: Lane, seconds: float, done: Callable[[], None]
    ) -> None:
        lane.since = self.process.world.now
        self.process.after(seconds, done)

    return patched((IndependentTrainer, "_occupy", occupy))


def an_independent_device_does_two_things_at_once() -> AbstractContextManager[None]:
    def begin(self: IndependentTrainer) -> None:
        self._free = [*self.lanes, replace(self.lanes[0])]

    return patched((IndependentTrainer, "__post_init__", begin))


def a_slice_is_trained_twice() -> AbstractContextManager[None]:
    original = IndependentTrainer._train

    def train(self: IndependentTrainer, lane: Lane, share: Share) -> None:
        if len(share.waiting) == 1:
            share.waiting.appendleft(share.waiting[0])
        original(self, lane, share)

    return patched((IndependentTrainer, "_train", train))


TRAINING_MUTANTS: tuple[Mutant, ...] = (
    the_trainer_admits_anything,
    the_trainer_trains_repeated_groups,
    a_contribution_that_comes_twice_is_added_twice,
    a_gradient_is_computed_with_whatever_weights_are_loaded,
    a_contribution_of_another_version_is_accepted,
    a_contribution_outlives_its_fragments,
    a_dead_device_keeps_its_group,
    a_released_gradient_is_computed_by_nobody,
    a_gradient_is_computed_in_the_middle_of_a_fragment,
    a_commit_does_not_wait_for_the_one_before,
    a_trainer_goes_on_from_a_version_that_was_refused,
    what_was_trained_beside_a_refused_version_is_kept,
    slices_are_added_to_whatever_batch_is_next,
    an_independent_device_does_two_things_at_once,
    a_slice_is_trained_twice,
)
