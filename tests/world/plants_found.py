"""Bugs that were there once, or that reviewers planted: each was found late, or by nobody."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random
from typing import Any

from digenrl.local.brokers import seaweedfs
from services.reward.app import RewardApp
from services.scheduler import limits
from services.scheduler.core import machine
from services.scheduler.core.fluid import rounds
from services.scheduler.core.fluid.fluid_state import ExchangeRound, FluidState
from services.scheduler.shell import api, app
from services.trainer.fluid import pieces, store_exchange
from services.trainer.fluid.exchange import WHOLE_BATCH, MemberRound, Sum
from services.trainer.fluid.sums import Term
from shared.bus.register import Register
from shared.messages.contracts import FragmentGenerated
from shared.messages.fluid import PieceTrained
from shared.run import files, layout, record_backups, run_recipe
from shared.run.retention import Retention
from shared.run.rights import WRITES
from shared.store import ObjectStore
from tests.world import bucket, companions
from tests.world.draws import Draw
from tests.world.intruder import NAME
from tests.world.plants import (
    Except,
    all_of,
    anywhere,
    has_intruder,
    has_standby,
    has_updates,
    is_stale,
    patched,
    plant,
    strikes,
)
from tests.world.rare_faults import SHORT_S, SPOILT


def intrudes_by_its_own_name(drawn: Draw) -> bool:
    """Whether a stolen key of rollout is used without names of others: nothing may come of it."""
    return drawn.intruder == "rollout" and Random(f"{drawn.seed}/{NAME}").random() >= 0.5


@plant(has_updates)
def r1_an_answer_lacks_its_update() -> AbstractContextManager[None]:
    def trained(**fields: Any) -> PieceTrained:
        return PieceTrained(**{**fields, "update": 0})

    return patched((pieces, "PieceTrained", trained))


@plant(has_intruder)
def r2_rules_and_listings_take_any_folder() -> AbstractContextManager[None]:
    """A rule's star reaches over folders, and the last part of a name counts wherever it is."""
    original, name_of = seaweedfs._identities, layout.parse_name

    def identities(keys: Any, runs: Any) -> Any:
        found: Any = original(keys, runs)
        for each in found[1:]:
            actions = [one for one in each["actions"] if not one.startswith("Write:")]
            writes = [f"Write:{seaweedfs.BUCKET}/*/{at}*" for at in WRITES[each["name"]]]
            each["actions"] = actions + writes
        return found

    def name_anywhere(run: str, folder: str, key: str) -> Any:
        last = f"{run}/{folder}/{key.rsplit('/', 1)[1]}"
        return name_of(run, folder, key) or name_of(run, folder, last)

    return patched((bucket, "_identities", identities), (layout, "parse_name", name_anywhere))


@plant(intrudes_by_its_own_name)
def r3_results_count_whoever_sends_them() -> AbstractContextManager[None]:
    """Nobody asks who was given the work, and a result's prompt is that of its message."""

    async def believed(_: RewardApp, event: FragmentGenerated) -> FragmentGenerated:
        return event

    anybody = lambda *_: False  # noqa: E731
    return patched(
        (machine, "is_foreign", anybody), (app, "is_foreign", anybody),
        (RewardApp, "_with_prompt_of_task", believed),
    )  # fmt: skip


@plant(anywhere, "flip", "kill")
def r6_small_records_have_no_copies() -> AbstractContextManager[None]:
    """And who finds one damaged ends, whatever it is for."""

    async def read(store: ObjectStore, run: str, name: str) -> bytes | None:
        return await store.read(f"{run}/{name}.json")

    async def records(store: ObjectStore, run: str, prefix: str, model: Any) -> Any:
        keys = await store.keys(f"{run}/files/{prefix}")
        return [model.model_validate_json(await store.read(key) or b"") for key in keys]

    return patched(
        (record_backups, "read_kept", read), (files, "read_kept", read),
        (run_recipe, "read_kept", read), (files, "read_records", records),
    )  # fmt: skip


def is_polled(drawn: Draw) -> bool:
    """Whether clients ask the scheduler all the time, and it is the only one (`Watch.start`)."""
    random = Random(f"{drawn.seed}/observers")
    asks = [random.choice([0]) or random.random() < 0.4 for _ in range(4)]
    return not drawn.standby and sum(asks) > 1


@plant(is_polled, "kill")
def r9_a_scheduler_that_has_read_nothing_tells_a_step() -> AbstractContextManager[None]:
    """It says 0, with status 200."""

    original = api._run

    def run(scheduler: Any) -> Any:
        ready: Any = Except(
            scheduler,
            state=lambda it: Except(it.state, recovering=lambda _: False),
            run_log=lambda it: Except(it.run_log, is_read=lambda _: True),
        )
        return original(ready)

    companions._scheduler_app.cache_clear()
    return patched((api, "_run", run))


@plant(has_standby)
def r11_a_standby_passes_nothing_on() -> AbstractContextManager[None]:
    original = companions.create_standby_app

    def silent(health: Any, _: Callable[[], str], trusted: Any = True) -> Any:
        return original(health, lambda: "", trusted)

    return patched((companions, "create_standby_app", silent))


@plant(all_of(strikes(SPOILT), lambda drawn: drawn.setting.schedule.slot_deadline_s == SHORT_S))
def m02_after_vain_rounds_the_missed_stay() -> AbstractContextManager[None]:
    """Those that are gone are excluded instead."""
    original = rounds._void_missed

    def void(fluid: FluidState, exchange: ExchangeRound, silent: frozenset[str]) -> FluidState:
        found = original(fluid, exchange, silent)
        if silent or found.num_failures < 2:
            return found
        missed = {a for address, each in exchange.missed.items() for a in each if a != address}
        return replace(found, out=fluid.out | (missed & fluid.gone))

    return patched((rounds, "_void_missed", void))


@plant(all_of(is_stale, lambda drawn: drawn.changes["run.keep_last"] == 1))
def m05_the_version_before_is_deleted_while_it_may_be_used() -> AbstractContextManager[None]:
    original = Retention.kept

    def kept(self: Retention, newest: int, **more: Any) -> set[int]:
        return original(replace(self, max_staleness=self.max_staleness - 1), newest, **more)

    return patched((Retention, "kept", kept))


@plant(has_standby, "cut")
def m11_a_scheduler_commands_after_its_lease_has_ended() -> AbstractContextManager[None]:
    return patched((limits, "RENEWED_WITHIN_S", 5.5))


@plant(lambda drawn: drawn.intruder == "trainer")
def m14_a_sum_that_lacks_a_share_ends_its_reader() -> AbstractContextManager[None]:
    def in_order(sums: Mapping[str, Sum], round_: MemberRound) -> list[Term]:
        if round_.by_group:
            return [sums[worker][group] for group, worker in round_.owner_of.items()]
        return [sums[share.worker][WHOLE_BATCH] for share in round_.contributors]

    return patched((store_exchange, "in_order", in_order))


@plant(has_standby)
def m16_an_empty_register_takes_two_entries() -> AbstractContextManager[None]:
    original = Register.write

    def unconditional(jetstream: Any) -> Any:
        return lambda subject, data, headers, timeout: jetstream.publish(
            subject, data, timeout=timeout
        )

    async def write(self: Register, data: bytes, *, replaces: int) -> int | None:
        if not replaces:
            stream: Any = Except(self.jetstream, publish=unconditional)
            self = replace(self, jetstream=stream)
        return await original(self, data, replaces=replaces)

    return patched((Register, "write", write))
