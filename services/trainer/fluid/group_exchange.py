"""Sums by a process group: NCCL between GPUs, gloo between CPUs.

The committer of a round listens on its own port (torch's TCPStore) and publishes the address in the
object store; the members meet there under the round's prefix. The sums go to the committer, added
on their way, and the total goes from there to all: as many bytes as a sum that everybody forms, and
the same bits everywhere. Deterministic runs send one group's gradient after the other, and
everybody adds them in the order of the groups.

A membership that has just formed a total is kept for the next batch's first round; any failure ends
it, and the next round meets again. No call waits without a limit: who has not come is waited for
outside of torch; of those that have, gloo's calls have a timeout, and NCCL's end when the group is
aborted, which the deadline does from outside, before torch's own watchdog ends the process. A NCCL
call that does not end even then ends this process, which is a new member when it comes back.

Once all have met, nothing shows which member is slow, and all wait for that member. So after a
round without a total, and where a line is measured as slow, sums go through the object store.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from services.trainer import limits
from services.trainer.fluid.exchange import WHOLE_BATCH, ExchangeIncomplete, MemberRound, Place, Sum
from services.trainer.fluid.store_exchange import StoreExchange, again, awaited
from services.trainer.fluid.sums import (
    TALLY_NAMES,
    SumLayout,
    Term,
    added,
    addition_order,
    in_order,
    parse_tally,
    tally_row,
)
from shared.diffusion.training.tally import Tally
from shared.errors import DigenRLError
from shared.process.service import end_soon
from shared.store import ObjectStore

PLACE_KEY = "place"

log = structlog.get_logger()


class ExchangeHung(DigenRLError):
    """A call of a lost process group does not end: this process has to."""


@dataclass(slots=True)
class Membership:
    """Processes that have met; one thread at a time uses it."""

    members: tuple[str, ...]
    name: str
    """Names the round that it met for."""
    store: Any
    group: Any = None
    """torch's process group, once all are there."""
    absent: tuple[str, ...] = ()
    """Members that had not come when the round was over."""
    is_over: threading.Event = field(default_factory=threading.Event)

    def meet(self, round_: MemberRound) -> None:
        """Wait until all members are there for this round: only then does a call begin that waits
        for them in torch. Raises RuntimeError if the membership is over before."""
        store = PrefixStore(f"here {round_.name}", self.store)
        store.set(round_.me, "here")
        while not store.check(list(self.members)):
            if self.is_over.wait(limits.GROUP_EXCHANGE_POLL_S):
                self.absent = tuple(each for each in self.members if not store.check([each]))
                raise RuntimeError("the round is over")

    def abort(self) -> None:
        """End what waits for others, from any thread, and let go of all connections."""
        self.is_over.set()
        group, self.group, self.store = self.group, None, None
        with contextlib.suppress(Exception):  # it may be in any state
            group.abort()


class GroupExchange:
    def __init__(self, store: ObjectStore, layout: SumLayout, address: str) -> None:
        """``address``: of this host, as other members reach it."""
        self._store = store
        self._layout = layout
        self._address = address
        self._kept: Membership | None = None
        self._by_store = StoreExchange(store, layout)

    @property
    def place(self) -> Place:
        return Place()

    @property
    def sum_bytes(self) -> int:
        return self._layout.num_bytes

    async def total(self, round_: MemberRound, own: Sum) -> Term:
        if len(round_.members) == 1:
            terms = in_order({round_.me: own}, round_)
            return await asyncio.to_thread(added, terms, self._layout)
        if round_.message.by_store:
            await self.close()
            return await self._by_store.total(round_, own)
        try:
            membership = await self._membership(round_)
        except TimeoutError:
            missing = () if round_.is_committer else (round_.committer,)
            raise ExchangeIncomplete(
                "no member published a meeting point in time", missing
            ) from None
        call = _Call(lambda: self._formed(membership, round_, own))
        try:
            async with asyncio.timeout(round_.seconds):
                total: Term = await call.result()
        except TimeoutError:
            await self._end(membership, call)
            reason = "not all members came and answered in time"
            raise ExchangeIncomplete(reason, membership.absent) from None
        except RuntimeError as error:  # torch's, for whatever goes wrong between processes
            raise ExchangeIncomplete(
                f"a member is lost: {str(error).splitlines()[0][:200]}"
            ) from error
        finally:
            if not (call.has_succeeded or membership.is_over.is_set()):
                await self._end(membership, call)
        self._kept = membership
        return total

    async def local_total(self, round_: MemberRound, sums: Mapping[str, Sum]) -> Term:
        return await asyncio.to_thread(added, in_order(sums, round_), self._layout)

    async def close(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            await asyncio.to_thread(kept.abort)

    async def _end(self, membership: Membership, call: "_Call") -> None:
        aborting = _Call(membership.abort)
        with contextlib.suppress(TimeoutError, RuntimeError, DigenRLError):
            async with asyncio.timeout(limits.GRACE_S):
                await aborting.result()
                await call.result()
        is_over = call.is_over and aborting.is_over
        if not is_over and self._layout.device.type == "cuda":
            end_soon()
            raise ExchangeHung("a process group does not end; this process does")

    async def _membership(self, round_: MemberRound) -> Membership:
        """Return the kept membership if the committer kept it, or begin a new one.

        Raises:
            TimeoutError: if the committer does not publish the round_ point in time.
            ExchangeIncomplete: if it is one that this member does not have.
        """
        kept, self._kept = self._kept, None
        if kept is not None and (kept.members != round_.members or round_.message.round):
            await asyncio.to_thread(kept.abort)
            kept = None
        name = round_.name
        key = f"{round_.folder}/{PLACE_KEY}.json"
        if round_.is_committer:
            if kept is None:
                store = await asyncio.to_thread(_serve, round_.seconds)
                kept = Membership(round_.members, name, store)
                place = {"name": name, "host": self._address, "port": store.port}
            else:
                place = {"name": kept.name}
            async with asyncio.timeout(round_.seconds):
                await again(partial(self._store.write, key, json.dumps(place).encode()))
            return kept
        async with asyncio.timeout(round_.seconds):
            place = json.loads(await awaited(self._store, key))
        if kept is not None and kept.name == place["name"]:
            return kept
        if kept is not None:
            await asyncio.to_thread(kept.abort)
        if "port" not in place:
            raise ExchangeIncomplete(
                "the other members began before this one arrived", (round_.me,)
            )
        reached = _Call(lambda: _reach(place["host"], place["port"], round_.seconds))
        try:
            return Membership(round_.members, place["name"], await reached.result())
        except RuntimeError as error:
            raise ExchangeIncomplete(
                f"the committer does not respond: {error}", (round_.committer,)
            ) from error

    def _formed(self, membership: Membership, round_: MemberRound, own: Sum) -> Term:
        """Meet and form the total, in a thread; raises RuntimeError if a member is lost."""
        if self._layout.device.type == "cuda":
            torch.cuda.set_device(self._layout.device)
        membership.meet(round_)
        if membership.group is None:
            membership.group = self._group(membership, round_)
        membership.group._set_default_timeout(self._limit(round_))
        group, root = membership.group, round_.members.index(round_.committer)
        tallies = self._tallies(group, round_, own)
        if round_.by_group:
            gradient = self._in_order(group, round_, own)
        else:
            term = own.get(WHOLE_BATCH)
            given = None if term is None else term.gradient
            gradient = self._layout.zeros() if given is None else given.clone()
            _reduce(group, gradient, root)
            _broadcast(group, gradient, root)
        if gradient.is_cuda:
            torch.cuda.current_stream(gradient.device).synchronize()
        return Term(gradient, tallies)

    def _limit(self, round_: MemberRound) -> timedelta:
        """Return how long torch waits in a call: in gloo for the rest of the round, in NCCL for
        longer, since the round's deadline aborts the group."""
        rest = limits.WATCHDOG_S if self._layout.device.type == "cuda" else 0.0
        return timedelta(seconds=max(1.0, round_.seconds) + rest)

    def _group(self, membership: Membership, round_: MemberRound) -> Any:
        rank, size = round_.members.index(round_.me), len(membership.members)
        store, limit = PrefixStore(membership.name, membership.store), self._limit(round_)
        if self._layout.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            return dist.ProcessGroupNCCL(store, rank, size, options)
        return _gloo(store, rank, size, limit, self._address)

    def _in_order(self, group: Any, round_: MemberRound, own: Sum) -> Tensor:
        """Add one group's gradient after the other, each from its owner. Groups without a gradient
        are skipped by all members: their owners announce them first."""
        total: Tensor | None = None
        owners = round_.owner_of
        has = torch.zeros(len(owners), dtype=torch.int32, device=self._layout.device)
        for place, number in enumerate(owners):
            term = own.get(number)
            if owners[number] == round_.me and term is not None and term.gradient is not None:
                has[place] = 1
        _all_reduce_small(group, has)
        for place, number in enumerate(owners):
            if not int(has[place]):
                continue
            gradient = self._layout.zeros()
            if owners[number] == round_.me:
                gradient.copy_(own[number].gradient)
            _broadcast(group, gradient, round_.members.index(owners[number]))
            total = gradient if total is None else total.add_(gradient)
        return self._layout.zeros() if total is None else total

    def _tallies(self, group: Any, round_: MemberRound, own: Sum) -> dict[str, float]:
        """Return the tallies of all terms, merged in the order in which gradients are added."""
        wanted = addition_order(round_)
        rows = torch.zeros(len(wanted), len(TALLY_NAMES), dtype=torch.float64)
        for place, (worker, key) in enumerate(wanted):
            if worker == round_.me and key in own:
                # Extremes of no rows are infinite, and inf + 0 = inf: the sum keeps each row.
                rows[place] = tally_row(own[key].tally)
        rows = rows.to(self._layout.device)
        _all_reduce_small(group, rows)
        merged = Tally()
        for row in rows.cpu():
            merged.merge(parse_tally(row))
        return merged.as_dict()


def _serve(seconds: float) -> Any:
    """Return a store on a free port that other members meet at."""
    timeout = timedelta(seconds=max(1.0, seconds))
    return TCPStore("0.0.0.0", 0, None, True, timeout, wait_for_workers=False)


def _reach(host: str, port: int, seconds: float) -> Any:
    timeout = timedelta(seconds=max(1.0, seconds))
    return TCPStore(host, port, None, False, timeout, wait_for_workers=False)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def _reduce(group: Any, tensor: Tensor, root: int) -> None:
    """Sum a tensor of all members into one member's."""
    options: Any = dist.ReduceOptions()
    options.reduceOp, options.rootRank = dist.ReduceOp.SUM, root
    group.reduce([tensor], options).wait()


def _broadcast(group: Any, tensor: Tensor, root: int) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group.broadcast([tensor], options).wait()


def _all_reduce_small(group: Any, tensor: Tensor) -> None:
    """Sum a small tensor of all members into all."""
    _reduce(group, tensor, 0)
    _broadcast(group, tensor, 0)


class _Call:
    """Runs something that may never end in a thread of its own, which does not keep the process."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[Any] = self._loop.create_future()
        self._done.add_done_callback(lambda done: done.cancelled() or done.exception())
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    async def result(self) -> Any:
        return await asyncio.shield(self._done)

    @property
    def is_over(self) -> bool:
        return self._done.done()

    @property
    def has_succeeded(self) -> bool:
        return self.is_over and self._done.exception() is None

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            result, error = work(), None
        except Exception as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: Exception | None) -> None:
        if error is None:
            self._done.set_result(result)
        else:
            self._done.set_exception(error)
