"""Commands of a shard group's first rank to the others: their part of collective work, and storing
their part of a version."""

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, TypeVar, cast

import torch

from services.trainer.engine.world import local_rank
from services.trainer.fluid.links import Message, RankLink
from shared.devices.protocols import VersionPart
from shared.errors import ContractError, OutOfMemory, RanksLost, Unavailable, Untrainable
from shared.run.manifest import StoredParts

T = TypeVar("T")


def together(mine: Callable[[], T], *, others: Sequence[Callable[[], object]]) -> T:
    """Do this rank's part of what all ranks do at once, while ``others`` wait for their answers;
    return the result of ``mine``.

    A rank that cannot do its part leaves the rest waiting for it, in exchanges that nothing
    interrupts. So each part has a thread of its own, which ends with this process at the latest.

    Raises:
        RanksLost: as soon as one rank fails.
    """
    done: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()

    def do(number: int, part: Callable[[], Any]) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank())  # a thread begins with the first GPU
        try:
            done.put((number, part(), None))
        except (OutOfMemory, Untrainable) as error:
            done.put((number, None, RanksLost(f"{error} (on rank 0)")))
        except BaseException as error:
            done.put((number, None, error))

    parts = [mine, *others]
    for number, part in enumerate(parts):
        Thread(target=do, args=(number, part), daemon=True).start()
    results = dict[int, T | None]()
    for _ in parts:
        number, result, error = done.get()
        if error is not None:
            raise error
        results[number] = result
    return cast(T, results[0])


def receive_answer(link: RankLink) -> Message:
    """Receive the answer of another rank, or raise its error here."""
    answer = link.receive()
    if answer.name == "refused":
        raise ContractError(answer.values["reason"])
    if answer.name == "lost":
        raise RanksLost(answer.values["reason"])
    return answer


@dataclass(frozen=True, slots=True)
class StoringRank:
    """Stores its part of versions in another process, one after the other."""

    link: RankLink
    _asking: threading.Lock = field(default_factory=threading.Lock)

    async def store(self, number: int, half: VersionPart) -> StoredParts:
        """Raises Unavailable if the store does not take it."""
        return await asyncio.to_thread(self._store, {"number": number, "half": half})

    def _store(self, what: dict[str, Any]) -> StoredParts:
        with self._asking:
            answer = self.link.ask(Message("store", what))
        if answer.name != "stored":
            raise Unavailable(answer.values["reason"])
        return StoredParts.model_validate_json(answer.blobs[0])
