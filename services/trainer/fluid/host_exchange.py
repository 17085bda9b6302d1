"""Has the members of a host add up their sums in its memory, so that each host exchanges one.

    members of a host -- their sums --> leader -- one sum of the host --> the other hosts'
        leaders
                      <-- the total --         <-------- the total ----

Members that share a memory are named by each member (`Holds.host`) and by each round
(`ExchangeSums.hosts`). The objects that otherwise go through the object store go through a folder
of main memory. If each group's gradient is separate, a leader forwards its host's gradients, and
they are added in the order of the groups as usual. NCCL needs none of this: its rings cross the
line between two hosts once.
"""

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from services.trainer.fluid.exchange import WHOLE_BATCH, Exchange, MemberRound, Place, Sum
from services.trainer.fluid.store_exchange import StoreExchange
from services.trainer.fluid.sums import SumLayout, Term, added, in_order
from shared.run.layout import batch_folder
from shared.store import ObjectStore
from shared.store.folder import FolderBackend

MEMORY = Path("/dev/shm")
NETWORK = Path("/proc/self/ns/net")
"""A separate network namespace counts as a host of its own, even if it shares the memory."""
PRIVATE_MODE = 0o700
NAME, LOCK, NEW = "name", "lock", ".new-"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Is a folder in this host's memory that only this user can use. Each process has a folder of
    its own there, with the rounds that it leads, and a lock that ends with the process."""

    folder: Path
    name: str
    """Is the same in all processes that see this folder, and in no others."""
    own: Path
    lock: int
    """Descriptor."""

    @classmethod
    def open(cls, address: str, needed: int, memory: Path = MEMORY) -> "HostMemory | None":
        """Return the memory of this host, with a folder for the process of this address; None
        without one, or if less than ``needed`` bytes are free."""
        try:
            folder = memory / f"digenrl-{os.getuid()}-{NETWORK.stat().st_ino}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir(PRIVATE_MODE)
            status, free = folder.lstat(), shutil.disk_usage(memory).free
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not is_own or stat.S_IMODE(status.st_mode) != PRIVATE_MODE or free < needed:
                log.warning("sums_not_shared", folder=str(folder), free=free, needed=needed)
                return None
            _forget_dead(folder)
            own, lock = _make_own(folder, address)
            return cls(folder, _folder_name(folder), own, lock)
        except OSError as error:
            log.warning("sums_not_shared", folder=str(memory), error=str(error))
            return None

    def forget(self, batch: int) -> None:
        """Delete what this process has led of batches before this one."""
        newest = self.folder / batch_folder(self.own.name, batch)
        for each in newest.parent.glob("*"):
            if each.name < newest.name:
                shutil.rmtree(each, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.own, ignore_errors=True)
        os.close(self.lock)


def _make_own(folder: Path, address: str) -> tuple[Path, int]:
    """Make the folder of a process, which has its lock from the moment in which it is there."""
    new, own = folder / f"{NEW}{address}", folder / address
    new.mkdir(PRIVATE_MODE)
    lock = os.open(new / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(own)
    return own, lock


def _forget_dead(folder: Path) -> None:
    """Delete the folders of processes that are no more."""
    for each in folder.iterdir():
        if each.name.startswith(NEW) or not each.is_dir():
            continue
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            lock = os.open(each / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(each, ignore_errors=True)
            finally:
                os.close(lock)


def _folder_name(folder: Path) -> str:
    """Return the name of a folder, chosen at random by the first process."""
    path = folder / NAME
    if not path.exists():
        first = folder / f"{NEW}{secrets.token_hex(8)}"
        first.write_text(secrets.token_hex(16))
        with contextlib.suppress(FileExistsError):
            os.link(first, path)
        first.unlink()
    return path.read_text()


class HostExchange:
    def __init__(self, among_hosts: Exchange, memory: HostMemory, layout: SumLayout) -> None:
        """``among_hosts``: forms the total of the leaders' sums."""
        self._among_hosts = among_hosts
        self._memory = memory
        self._layout = layout
        self._on_host = StoreExchange(ObjectStore(FolderBackend(memory.folder)), layout)

    @property
    def place(self) -> Place:
        return Place(self._memory.name, self._among_hosts.place.site)

    @property
    def sum_bytes(self) -> int:
        return self._layout.num_bytes

    async def total(self, round_: MemberRound, own: Sum) -> Term:
        await asyncio.to_thread(self._memory.forget, round_.message.batch)
        here = round_.on_host  # no other run has its leader's address, nor a later start of this
        here = replace(here, run=here.committer)
        return await total_of_places(
            round_, own, here, self._on_host, self._among_hosts, self._layout
        )

    async def local_total(self, round_: MemberRound, sums: Mapping[str, Sum]) -> Term:
        total: Term = await self._among_hosts.local_total(round_, sums)
        return total

    async def close(self) -> None:
        await self._among_hosts.close()
        self._memory.close()


async def total_of_places(
    round_: MemberRound, own: Sum, here: MemberRound, near: StoreExchange, among: Exchange,
    layout: SumLayout,
) -> Term:  # fmt: skip
    """Return the total of a round whose members add up their sums at the leaders of their places
    first."""
    if not here.is_committer:
        return await near.exchange_sum(here, own)
    sums = await near.gathered(here, own)
    together = await asyncio.to_thread(_together, here, sums, layout)
    total: Term = await among.total(round_.among_hosts, together)
    await near.give(here, total)
    return total


def _together(here: MemberRound, sums: dict[str, Sum], layout: SumLayout) -> Sum:
    if len(here.members) == 1:
        return sums[here.me]
    terms = in_order(sums, here)
    if here.by_group:
        return dict(zip(here.owner_of, terms, strict=True))
    return {WHOLE_BATCH: added(terms, layout)} if terms else {}
