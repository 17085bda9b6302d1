"""Bugs of the scheduler's core and of how it is restored, of the bus, and of commits."""

import asyncio
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from services.rollout import app as rollout
from services.scheduler.core import assign, exclusion, fragments, ready_groups
from services.scheduler.core.fluid import control, events, pieces, rounds, stream_recovery
from services.scheduler.core.recovery import RECOVERED_STREAMS
from services.scheduler.core.state import (
    BatchState,
    FragmentState,
    GroupState,
    Plan,
    State,
    WorkerState,
    new_batch,
)
from services.scheduler.core.unissued import unissued_samples
from services.scheduler.core.workers import Workers
from services.scheduler.shell import app
from services.trainer.fluid import committing
from services.trainer.fluid import pieces as member_pieces
from shared.bus import streams
from shared.messages import subjects
from shared.messages.contracts import FragmentSlot
from shared.run import commits, layout, record_backups
from tests.world.plants import anywhere, has_updates, is_patient, is_stale, patched, plant


@plant(anywhere, "cut")
def slots_take_any_number_of_messages() -> AbstractContextManager[None]:
    original = streams.stream_config

    def config(stream: subjects.Stream) -> Any:
        return original(stream).evolve(max_msgs_per_subject=-1, discard_new_per_subject=False)

    return patched((streams, "stream_config", config))


@plant(anywhere)
def a_version_is_committed_twice() -> AbstractContextManager[None]:
    async def commit(store: Any, record: commits.CommitRecord) -> None:
        key = layout.commit_key(record.run, record.policy.version)
        await store.write(key, record_backups.sealed(record.encode()))

    return patched((committing, "commit", commit))


@plant()
def a_lost_worker_keeps_its_fragments() -> AbstractContextManager[None]:
    def lost(plan: Plan, state: State, address: str) -> State:
        left = {a: w for a, w in state.workers.items() if a != address}
        return replace(state, workers=Workers(left))

    return patched((fragments, "worker_lost", lost))


@plant(anywhere, "succeed")
def a_released_fragment_is_issued_under_the_same_attempt() -> AbstractContextManager[None]:
    def given(state: State, slot: FragmentSlot, found: FragmentState) -> State:
        return state.with_fragment(slot, replace(found, stage="pending", worker=None))

    return patched((fragments, "_requeue", given))


@plant()
def a_failed_fragment_is_issued_under_the_same_attempt() -> AbstractContextManager[None]:
    def same(*, attempt: int, num_failures: int = 0, **rest: Any) -> FragmentState:
        return FragmentState(
            attempt=attempt - (num_failures > 0), num_failures=num_failures, **rest
        )

    return patched((fragments, "FragmentState", same))


@plant()
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

    nothing = lambda *_, **__: None  # noqa: E731
    return patched(
        (assign, "open_supply", any_batch), (rollout, "check_task", nothing),
        (member_pieces, "check_task", nothing),
    )  # fmt: skip


@plant()
def a_group_is_finished_with_the_next_version() -> AbstractContextManager[None]:
    def kept(group: GroupState) -> GroupState:
        pending = tuple(
            f if f.stage in ("scored", "generated")
            else replace(f, stage="pending", worker=None, attempt=f.attempt + 1)
            for f in group.fragments
        )  # fmt: skip
        return replace(group, policy=None, fragments=pending)

    return patched((fragments, "discard_group", kept))


def _recovery_without(stream: subjects.Stream) -> AbstractContextManager[None]:
    async def read_back(self: app.Scheduler) -> dict[str, int]:
        found = await asyncio.gather(*map(self.bus.stored, RECOVERED_STREAMS))
        for each, (messages, _) in zip(RECOVERED_STREAMS, found, strict=True):
            if each is not stream:
                await self._replay(messages)
        return {
            each.name: number for each, (_, number) in zip(RECOVERED_STREAMS, found, strict=True)
        }

    return patched((app.Scheduler, "_read_back", read_back))


@plant(is_patient, "kill")
def recovery_skips_the_tasks() -> AbstractContextManager[None]:
    return _recovery_without(subjects.TASK)


@plant(is_patient, "kill")
def recovery_skips_the_groups() -> AbstractContextManager[None]:
    return _recovery_without(subjects.TRAIN)


@plant(is_patient, "kill")
def recovery_skips_the_events() -> AbstractContextManager[None]:
    return _recovery_without(subjects.EVT)


@plant(anywhere, "kill")
def recovery_skips_the_scores() -> AbstractContextManager[None]:
    return _recovery_without(subjects.REW)


@plant(anywhere, "hang")
def a_device_that_hangs_keeps_its_fragments() -> AbstractContextManager[None]:
    return patched((exclusion, "_exclude_late", lambda plan, state, worker: state))


@plant(anywhere)
def a_step_is_ordered_before_all_have_confirmed() -> AbstractContextManager[None]:
    return patched((rounds, "_silent", lambda fluid, exchange: frozenset()))


@plant(is_patient, "kill")
def what_a_lost_member_had_is_nobodys() -> AbstractContextManager[None]:
    return patched((events, "member_lost", lambda state, address: state))


@plant(anywhere)
def a_piece_keeps_its_number() -> AbstractContextManager[None]:
    original = pieces._given

    def given(state: State, fluid: Any, member: Any, key: Any, now: float) -> Any:
        group = fluid.groups[key[0]]
        number = group.pieces[key[1]].piece.number if group.pieces[key[1]].since < 0 else key[1]
        fluid = fluid.with_group(key[0], replace(group, next_number=number))
        return original(state, fluid, member, key, now)

    return patched((pieces, "_given", given))


@plant(anywhere)
def the_next_batch_is_trained_before_the_record() -> AbstractContextManager[None]:
    """Groups by a version that may be lost are trained."""
    original = control._send_groups

    def send(plan: Plan, state: State) -> Any:
        fluid = state.fluid
        if fluid is None or fluid.provisional is None or len(state.batches) < 2:
            return original(plan, state)
        sent = []
        for ready in list(ready_groups.ready_groups(plan, state)):
            if ready.batch.index == fluid.batch + 1:
                sent.append(ready_groups.train_command(plan, ready))
                group = replace(ready.group, sent=True)
                state = state.with_group(ready.batch.index, ready.index, group)
        return state, sent

    return patched((control, "_send_groups", send))


@plant(anywhere)
def what_a_lost_version_made_is_kept() -> AbstractContextManager[None]:
    """Groups of the next batch keep the version that was never committed."""
    keep = lambda state: state  # noqa: E731
    return patched(
        (control, "drop_lost_version", keep), (stream_recovery, "drop_lost_version", keep),
        (fragments, "drop_stale_groups", lambda plan, state: state),
    )  # fmt: skip


@plant(is_patient, "kill")
def nobody_else_commits() -> AbstractContextManager[None]:
    return patched((rounds, "_commit", lambda plan, state, now, commands: state))


@plant(anywhere, "cut store")
def an_exchange_has_no_deadline() -> AbstractContextManager[None]:
    original = rounds._end_round

    def ends(plan: Plan, state: State, now: float, commands: Any) -> State:
        return original(plan, state, 0.0, commands)

    return patched((rounds, "_end_round", ends), (rounds, "max_seconds", lambda *_: 1e6))


@plant(is_stale)
def a_group_that_was_begun_early_goes_on_with_the_new_version() -> AbstractContextManager[None]:
    """Its next fragments are by whatever version is newest."""
    original = assign.issue

    def issue(draft: Any, worker: WorkerState, found: Any) -> Any:
        group = draft.group(draft.open_batch(found.batch), found.group)
        if group.policy not in (None, draft.state.policy):
            draft.set_group(found.batch, found.group, replace(group, policy=draft.state.policy))
        return original(draft, worker, found)

    return patched((assign, "issue", issue))


@plant(has_updates)
def nothing_begins_again() -> AbstractContextManager[None]:
    """Who has taken updates of an attempt that is over keeps them."""
    return patched((rounds, "_tell_attempt", lambda plan, state, commands: state))
