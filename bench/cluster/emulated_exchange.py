"""Where emulated members exchange sums: within their host's process first, then between hosts.

Hosts meet over the broker, past its streams, in a few messages; the seconds that the gradients
would take on their line go by from the moment in which the last host has come, on all alike.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nats.aio.client import Client
from nats.aio.msg import Msg

from bench.cluster.accounts import Account, Total, packed, total_of, unpacked
from bench.cluster.hold import Held
from bench.cluster.stores import at_least
from bench.runner.figures import Interval
from services.scheduler.costs.shape import Shape
from services.trainer.fluid.exchange import WHOLE_BATCH, ExchangeIncomplete, MemberRound, Place, Sum

KEPT_ROUNDS = 4


@dataclass(slots=True)
class Table:
    """One round, as a host sees it."""

    accounts: dict[str, Account] = field(default_factory=dict)
    """Address -> what that member brings; of all hosts."""
    own: dict[str, Account] = field(default_factory=dict)
    """The same of the members here."""
    total: "asyncio.Task[Total] | None" = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class HostExchange:
    """The meeting place of one host's members."""

    client: Client
    subject: str
    shape: Shape
    seconds: Callable[[int], float]
    """Number of members -> seconds of an exchange, scaled."""
    here: set[str] = field(default_factory=set)
    """Addresses of the members of this host."""
    _tables: dict[str, Table] = field(default_factory=dict)

    async def open(self) -> None:
        await self.client.subscribe(self.subject, cb=self._hear)
        await self.client.flush()

    async def join(self, round_: MemberRound, account: Account) -> Total:
        """Return the total of a round, once all have come and it would be there.

        Raises:
            ExchangeIncomplete: if somebody has not come by the deadline.
        """
        table, wanted = self._table(round_.name), set(round_.members)
        table.own[round_.me] = account
        if table.own.keys() == wanted & self.here:
            await self.client.publish(self.subject, packed(round_.name, table.own))
        try:
            async with asyncio.timeout(round_.seconds):
                while not wanted <= table.accounts.keys():
                    table.changed.clear()
                    await table.changed.wait()
                table.total = table.total or asyncio.create_task(self._total(round_, table))
                return await asyncio.shield(table.total)
        except TimeoutError:
            missing = sorted(wanted - table.accounts.keys())
            raise ExchangeIncomplete("the sums were not there in time", tuple(missing)) from None

    async def _hear(self, raw: Msg) -> None:
        name, accounts = unpacked(raw.data)
        table = self._table(name)
        table.accounts.update(accounts)
        table.changed.set()

    async def _total(self, round_: MemberRound, table: Table) -> Total:
        message = round_.message
        came = {address: table.accounts[address] for address in round_.members}
        async with at_least(self.seconds(len(came))):
            return await asyncio.to_thread(
                total_of, came, self.shape, message.batch, message.policy.weights_digest
            )

    def _table(self, name: str) -> Table:
        while len(self._tables) > KEPT_ROUNDS:
            del self._tables[next(iter(self._tables))]
        return self._tables.setdefault(name, Table())


@dataclass(slots=True)
class EmulatedExchange:
    """Implements `Exchange` for one member."""

    meeting_place: HostExchange
    held: Held

    @property
    def place(self) -> Place:
        return Place()  # it is a host's already

    @property
    def sum_bytes(self) -> int:
        return 0  # nothing crosses a line

    async def total(self, round_: MemberRound, own: Sum) -> Total:
        began = self.held.clock()
        found = await self.meeting_place.join(round_, own.get(WHOLE_BATCH, Account()))
        self.held.intervals.append(Interval(self.held.name, "exchange", began, self.held.clock()))
        return found

    async def local_total(self, round_: MemberRound, sums: Mapping[str, Sum]) -> Total:
        message, shape = round_.message, self.meeting_place.shape
        accounts = {worker: own.get(WHOLE_BATCH, Account()) for worker, own in sums.items()}
        return total_of(accounts, shape, message.batch, message.policy.weights_digest)

    async def close(self) -> None:
        """Keep nothing: the host's connection is closed by its process."""
