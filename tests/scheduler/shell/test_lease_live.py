"""The lease of two schedulers on a real NATS server: who commands, and when it changes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from services.scheduler import limits
from services.scheduler.shell import lease as leases
from services.scheduler.shell.disk_watch import STORE
from services.scheduler.shell.lease import (
    Lease,
    LeaseRecord,
    ProcessRecord,
    claim_epoch,
    newest_epoch,
)
from shared.bus.bus import Bus
from shared.bus.register import Register, RegisterEntry
from shared.errors import LeaseLost, Unavailable
from shared.process.service import Health
from shared.store import ObjectStore
from shared.telemetry import ALARM, NATS_STORES_NOTHING
from tests.waiting import until

pytestmark = pytest.mark.broker
WAIT_S = 20
ELSEWHERE = ProcessRecord(boot="another host", namespace="", pid=1, started="")


@dataclass
class Clock:
    """A monotonic clock that stands still for what its process does not notice."""

    behind: float = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() - self.behind


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEASE_TTL_S", 0.8)
    monkeypatch.setattr(limits, "LEASE_RENEW_S", 0.1)
    monkeypatch.setattr(limits, "LEASE_RETRY_S", 0.05)
    monkeypatch.setattr(limits, "HOLDER_HEAD_START_S", 0.4)


def another(bus: Bus, store: ObjectStore, name: str) -> Lease:
    """A scheduler on a host of its own: nobody sees whether its process is there."""
    found = Lease(bus, store, Health(), f"http://{name}:8000")
    found._mine = found._mine.model_copy(update={"process": ELSEWHERE})
    return found


@contextlib.asynccontextmanager
async def taking(lease: Lease) -> AsyncIterator["asyncio.Task[int]"]:
    async def take() -> int:
        async with lease.held():
            await lease.keep()
        raise AssertionError

    task = asyncio.create_task(take())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_held(lease: Lease) -> int:
    await until(lambda: lease._held)
    return lease.epoch


async def test_one_commands_and_the_other_stands_by_until_it_is_given_the_lease(
    bus: Bus, folder_store: ObjectStore
) -> None:
    first, second = (another(bus, folder_store, name) for name in ("first", "second"))
    async with taking(first):
        before = await until_held(first)
        async with taking(second):
            await until(lambda: "first:8000 commands" in second.health.reason)
            assert not second.health.ready
            await asyncio.sleep(2 * limits.LEASE_TTL_S)  # it is renewed all the time
            assert second._held is None
            await first._release()
            after = await until_held(second)
    assert after > before
    assert await newest_epoch(folder_store, "test") == after


async def test_a_holder_that_is_dead_on_this_host_is_not_waited_for(
    bus: Bus, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEASE_TTL_S", 600.0)
    dead, heir = (Lease(bus, folder_store, Health()) for _ in range(2))
    gone = ProcessRecord.this().model_copy(update={"started": "1"})
    dead._mine = dead._mine.model_copy(update={"process": gone})
    await dead._take()
    async with taking(heir):
        assert await until_held(heir) > dead.epoch
        with pytest.raises(LeaseLost):
            await dead._renew()


async def test_an_entry_that_nobody_renews_is_nobodys_though_the_broker_keeps_it(
    bus: Bus, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LEASE_TTL_S", 600.0)  # as after the broker's clock was set back
    monkeypatch.setattr(limits, "ABANDONED_S", 0.5)
    dead, heir = (another(bus, folder_store, name) for name in ("dead", "heir"))
    await dead._take()
    async with taking(heir):
        assert await until_held(heir) > dead.epoch
        with pytest.raises(LeaseLost):
            await dead._renew()


async def test_a_holder_goes_on_after_an_outage_if_nobody_took_the_lease(
    bus: Bus, folder_store: ObjectStore
) -> None:
    lease = another(bus, folder_store, "only")
    await lease._take()
    before = lease._held
    await asyncio.sleep(2 * limits.LEASE_TTL_S)  # the entry leaves the register
    assert await lease._register.read() is None
    assert await lease._renew()
    assert before is not None
    assert lease._held == before.goes_on(before.revision + 1)


async def test_a_holder_that_slept_finds_that_another_has_commanded(
    bus: Bus, folder_store: ObjectStore
) -> None:
    """It does so too if the other has ended since and left nothing behind."""
    asleep, other = (another(bus, folder_store, name) for name in ("asleep", "other"))
    await asleep._take()
    async with taking(other):
        await until_held(other)
    await asyncio.sleep(2 * limits.LEASE_TTL_S)
    assert await other._register.read() is None
    with pytest.raises(LeaseLost):
        await asleep._renew()


async def test_a_holder_confirms_no_command_by_a_lease_that_is_old(
    bus: Bus, folder_store: ObjectStore
) -> None:
    clock = Clock()
    lease = Lease(bus, folder_store, Health(), clock=clock)
    await lease._take()
    await lease.confirm()
    clock.behind -= 10.0  # it was stopped for so long
    confirming = asyncio.create_task(lease.confirm())
    await asyncio.sleep(0.05)
    assert not confirming.done()
    await lease._renew()
    await asyncio.wait_for(confirming, WAIT_S)


@pytest.mark.parametrize(("seconds", "confirms"), [(2.3, True), (2.7, False)])
async def test_commands_are_sent_for_two_and_a_half_seconds_after_a_renewal(
    bus: Bus, folder_store: ObjectStore, seconds: float, confirms: bool
) -> None:
    """The lease lasts 3 s: beyond it another scheduler may command."""
    clock = Clock()
    lease = Lease(bus, folder_store, Health(), clock=clock)
    await lease._take()
    clock.behind = asyncio.get_running_loop().time() - lease._renewed_at - seconds
    confirming = asyncio.create_task(lease.confirm())
    await asyncio.sleep(0.05)
    assert confirming.done() is confirms
    confirming.cancel()


async def test_a_register_that_was_lost_is_made_again_and_epochs_go_on(
    bus: Bus, folder_store: ObjectStore
) -> None:
    lease = another(bus, folder_store, "first")
    await lease._take()
    for _ in range(3):
        await lease._renew()
    epoch = lease.epoch
    await bus.jetstream.delete_stream("KV_DG_LEASE_test")
    while not await lease._renew():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert (lease.epoch, lease._held and lease._held.revision) == (epoch, 1)
    later = another(bus, folder_store, "later")
    await lease._release()
    await later._take()
    assert later.epoch > epoch


async def test_a_holder_does_not_go_on_over_another_s_entry_in_a_register_that_was_lost(
    bus: Bus, folder_store: ObjectStore
) -> None:
    """Both entries were the first of their register. The holder would have commanded in an epoch
    that nobody heeds any more."""
    holder, other = another(bus, folder_store, "holder"), another(bus, folder_store, "other")
    await holder._take()
    await bus.jetstream.delete_stream("KV_DG_LEASE_test")
    assert not await holder._renew()
    await other._take()
    assert (holder._held and holder._held.revision, other._held and other._held.revision) == (1, 1)
    with pytest.raises(LeaseLost):
        await holder._renew()
    await holder._release()  # what is another's, it does not give back
    assert await other._renew()


async def test_who_takes_over_says_that_the_store_takes_nothing(
    bus: Bus, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NATS_ALARM_DELAY_S", 0.1)
    is_full = True

    async def may_claim(*given: Any) -> int:
        if is_full:
            raise Unavailable("the store's disk is full")
        return await claim_epoch(*given)

    monkeypatch.setattr(leases, "claim_epoch", may_claim)
    lease = another(bus, folder_store, "first")
    async with taking(lease):
        await until(lambda: "the object store takes nothing" in lease.health.reason)
        assert ALARM.labels(what=STORE)._value.get() == 1
        is_full = False
        await until_held(lease)
        assert ALARM.labels(what=STORE)._value.get() == 0


def test_an_entry_of_another_release_is_nobodys() -> None:
    assert leases._decoded(RegisterEntry(1, b"{}")) is None
    here = LeaseRecord(scheduler="a", process=ProcessRecord.this())
    assert not leases._is_free(here)


async def test_a_standby_says_that_the_broker_stores_nothing_where_nobody_commands(
    bus: Bus, folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker's disk is full, and the scheduler that commanded has died."""
    monkeypatch.setattr(limits, "NATS_ALARM_DELAY_S", 0.1)
    monkeypatch.setattr(limits, "HOLDER_HEAD_START_S", 0.05)
    is_full, write = True, Register.write

    async def may_write(register: Register, data: bytes, *, replaces: int) -> int | None:
        if is_full:
            raise Unavailable("insufficient storage resources available")
        return await write(register, data, replaces=replaces)

    monkeypatch.setattr(Register, "write", may_write)
    lease = another(bus, folder_store, "first")
    async with taking(lease):
        await until(lambda: lease.health.reason.startswith(NATS_STORES_NOTHING))
        assert ALARM.labels(what="nats_stores_nothing")._value.get() == 1
        is_full = False
        await until_held(lease)
