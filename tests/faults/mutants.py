"""Planted bugs, each on the code that really runs. The checker has to notice every one of them."""

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from services.scheduler.core import assign, exclusion, fragments, lending, supply
from services.scheduler.core.recovery import READ_BACK
from services.scheduler.core.state import (
    BatchState,
    FragmentState,
    GroupState,
    Plan,
    State,
    WorkerState,
    new_batch,
)
from services.scheduler.core.supply import unissued_samples
from services.scheduler.core.workers import Workers
from services.scheduler.sim import batches, devices, independent_devices, scheduler, trainer
from services.scheduler.sim.devices import SimReward, SimRollout
from services.scheduler.sim.trainer import SimTrainer
from shared.devices.loan import Loan, apply
from shared.messages import subjects
from shared.messages.contracts import (
    FragmentGenerated,
    FragmentSlot,
    GenerateFragment,
    Message,
    SetDevice,
)
from tests.examples import with_schedule
from tests.faults import nemesis
from tests.faults.planting import Mutant, built, patched, together
from tests.faults.training_mutants import TRAINING_MUTANTS


def slots_take_any_number_of_messages() -> AbstractContextManager[None]:
    return built(lambda cluster: setattr(cluster.broker, "dedupe", False))


def a_version_is_committed_twice() -> AbstractContextManager[None]:
    return built(lambda cluster: setattr(cluster.commits, "fenced", False))


def a_lost_worker_keeps_its_fragments() -> AbstractContextManager[None]:
    def lost(plan: Plan, state: State, address: str) -> State:
        left = {a: w for a, w in state.workers.items() if a != address}
        return replace(state, workers=Workers(left))

    return patched((fragments, "worker_lost", lost))


def a_released_fragment_is_issued_under_the_same_attempt() -> AbstractContextManager[None]:
    def given(state: State, slot: FragmentSlot, found: FragmentState) -> State:
        return state.with_fragment(slot, replace(found, stage="pending", worker=None))

    return patched((fragments, "_requeue", given))


def a_failed_fragment_is_issued_under_the_same_attempt() -> AbstractContextManager[None]:
    def same(*, attempt: int, num_failures: int = 0, **rest: Any) -> FragmentState:
        return FragmentState(
            attempt=attempt - (num_failures > 0), num_failures=num_failures, **rest
        )

    return patched((fragments, "FragmentState", same))


def nobody_checks_the_staleness_of_tasks() -> AbstractContextManager[None]:
    def any_batch(
        plan: Plan, state: State, *, after: int | None = None
    ) -> tuple[BatchState, int] | None:
        batch = state.batch
        if batch is None or (after is not None and after > batch.index):
            return None
        if after is None and unissued_samples(plan, batch, plan.num_groups):
            return batch, plan.num_groups
        if batch.index + 1 >= plan.num_batches:
            return None
        early = state.find_batch(batch.index + 1) or new_batch(plan, batch.index + 1, 0.0)
        number = max(1, plan.early_groups)
        return (early, number) if unissued_samples(plan, early, number) else None

    return patched(
        (assign, "open_supply", any_batch), (devices, "check_task", lambda *_, **__: None)
    )


def any_number_of_groups_is_begun_early() -> AbstractContextManager[None]:
    original = supply.open_supply

    def any_group(
        plan: Plan, state: State, *, after: int | None = None
    ) -> tuple[BatchState, int] | None:
        return original(with_schedule(plan, early_fraction=1.0), state, after=after)

    return patched((assign, "open_supply", any_group))


def waiting_groups_keep_a_superseded_version() -> AbstractContextManager[None]:
    return patched((fragments, "drop_stale_groups", lambda plan, state: state))


def a_group_is_finished_with_the_next_version() -> AbstractContextManager[None]:
    def kept(group: GroupState) -> GroupState:
        pending = tuple(
            f if f.stage in ("scored", "generated")
            else replace(f, stage="pending", worker=None, attempt=f.attempt + 1)
            for f in group.fragments
        )  # fmt: skip
        return replace(group, policy=None, fragments=pending)

    return patched((fragments, "discard_group", kept))


def devices_begin_superseded_versions() -> AbstractContextManager[None]:
    def refusal(self: SimRollout, task: GenerateFragment) -> Message | None:
        return None

    return patched((SimRollout, "_refusal", refusal))


def _recovery_without(stream: subjects.Stream) -> AbstractContextManager[None]:
    streams = tuple(s for s in READ_BACK if s is not stream)
    original = scheduler.SimScheduler._follow

    def follow(self: scheduler.SimScheduler) -> None:
        self._followed.setdefault(stream.name, len(self.broker.stored.get(stream.name, [])))
        original(self)

    return patched((scheduler, "READ_BACK", streams), (scheduler.SimScheduler, "_follow", follow))


def recovery_skips_the_tasks() -> AbstractContextManager[None]:
    return _recovery_without(subjects.TASK)


def recovery_skips_the_groups() -> AbstractContextManager[None]:
    return _recovery_without(subjects.TRAIN)


def _without_deadlines() -> AbstractContextManager[None]:
    """Deadlines would give what a bug leaves with one device to another."""

    def never(*_: object) -> float:
        return math.inf

    return patched((exclusion, "fragment_deadline", never), (exclusion, "gradient_deadline", never))


def recovery_skips_the_contributions() -> AbstractContextManager[None]:
    """The schedules favour what it takes here: a scheduler dies while gradients are computed."""
    kill = partial(nemesis.Nemesis.kill, kind="scheduler")
    faults = (("kill scheduler", kill), ("request TAG", nemesis.Nemesis.request_tag))
    planted = patched((nemesis, "FAULTS", faults))
    return together(_recovery_without(subjects.PART), planted, _without_deadlines())


def recovery_skips_the_events() -> AbstractContextManager[None]:
    return _recovery_without(subjects.EVT)


def recovery_skips_the_scores() -> AbstractContextManager[None]:
    return _recovery_without(subjects.REW)


def devices_follow_old_commands() -> AbstractContextManager[None]:
    def apply_any(loan: Loan, command: SetDevice, now: float) -> Loan:
        return apply(Loan(), command, now)

    return patched((batches, "apply", apply_any))


def loans_never_end() -> AbstractContextManager[None]:
    lent = lambda loan, now: loan.mode == "generate"  # noqa: E731
    return patched(
        (trainer, "may_generate", lent), (independent_devices, "may_generate", lent),
        (batches, "tick", lambda loan, now: loan),
    )  # fmt: skip


def a_device_helps_while_it_trains() -> AbstractContextManager[None]:
    original = SimTrainer._act

    def act(self: SimTrainer) -> None:
        if self._training and not self._running and self.loan.mode == "generate":
            self._help()
        else:
            original(self)

    return patched((SimTrainer, "_act", act))


def a_device_trains_in_the_middle_of_a_step() -> AbstractContextManager[None]:
    original = SimTrainer._act

    def act(self: SimTrainer) -> None:
        group = None if self._training else self._next_group()
        if self._running and group is not None:
            self._train(group)
        else:
            original(self)

    return patched((SimTrainer, "_act", act))


def a_paused_fragment_is_finished_with_the_next_version() -> AbstractContextManager[None]:
    nothing = lambda self: None  # noqa: E731
    return patched((SimTrainer, "_drop", nothing), (SimTrainer, "_drop_stale", nothing))


def a_dropped_fragment_is_not_reported() -> AbstractContextManager[None]:
    """The schedules favour a scheduler that dies at that moment; otherwise this is harmless."""

    def drop(self: SimTrainer) -> None:
        self._helping.clear()
        self._waiting.clear()

    kill = (("kill after a command", nemesis.Nemesis.kill_after_a_command),)
    return patched(
        (SimTrainer, "_drop", drop), (nemesis, "FAULTS", kill),
        (nemesis, "FAILPOINTS", ("took back",)),
    )  # fmt: skip


def an_old_trainer_is_believed() -> AbstractContextManager[None]:
    original = lending.has_ready

    def has_ready(plan: Plan, batch: BatchState, worker: WorkerState) -> bool:
        groups = tuple(
            replace(g, trained_by=(worker.address,) if g.trained_by else ()) for g in batch.groups
        )
        return original(plan, replace(batch, groups=groups), worker)

    return patched((lending, "has_ready", has_ready))


def rewards_are_acknowledged_before_they_are_published() -> AbstractContextManager[None]:
    original = SimReward._begin

    def begin(self: SimReward, event: FragmentGenerated) -> None:
        self.broker.ack(subjects.TRAJ, event)
        original(self, event)

    return patched((SimReward, "_begin", begin))


def a_device_that_hangs_keeps_its_fragments() -> AbstractContextManager[None]:
    return patched((exclusion, "_exclude_late", lambda plan, state, worker: state))


def a_device_that_hangs_is_given_work_again() -> AbstractContextManager[None]:
    original = exclusion._exclude_late

    def given(plan: Plan, state: State, worker: WorkerState) -> State:
        state = original(plan, state, worker)
        again = replace(state.workers[worker.address], excluded=None, assigned=())
        return state.with_worker(again)

    return patched((exclusion, "_exclude_late", given))


def a_device_that_returns_everything_is_given_work_for_ever() -> AbstractContextManager[None]:
    return patched((exclusion, "count_return", lambda plan, state, event, now: state))


MUTANTS: tuple[Mutant, ...] = (
    slots_take_any_number_of_messages,
    a_version_is_committed_twice,
    a_lost_worker_keeps_its_fragments,
    a_released_fragment_is_issued_under_the_same_attempt,
    a_failed_fragment_is_issued_under_the_same_attempt,
    nobody_checks_the_staleness_of_tasks,
    any_number_of_groups_is_begun_early,
    waiting_groups_keep_a_superseded_version,
    a_group_is_finished_with_the_next_version,
    devices_begin_superseded_versions,
    recovery_skips_the_tasks,
    recovery_skips_the_groups,
    recovery_skips_the_events,
    recovery_skips_the_scores,
    recovery_skips_the_contributions,
    devices_follow_old_commands,
    loans_never_end,
    a_device_helps_while_it_trains,
    a_device_trains_in_the_middle_of_a_step,
    a_paused_fragment_is_finished_with_the_next_version,
    a_dropped_fragment_is_not_reported,
    an_old_trainer_is_believed,
    rewards_are_acknowledged_before_they_are_published,
    a_device_that_hangs_keeps_its_fragments,
    a_device_that_hangs_is_given_work_again,
    a_device_that_returns_everything_is_given_work_for_ever,
    *TRAINING_MUTANTS,
)
