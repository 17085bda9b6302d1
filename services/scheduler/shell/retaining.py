"""Deletes weights and checkpoints of versions that nobody needs any more."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import structlog

from shared.errors import Unavailable
from shared.run.commits import CommitRecord
from shared.run.layout import (
    checkpoints_folder,
    measured_versions,
    wanted_evaluations,
    weights_folder,
)
from shared.run.retention import Retention, deletable
from shared.store import ObjectStore

LOOK_S = 5.0
"""Between two looks; nothing hurries."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Retaining:
    store: ObjectStore
    run: str
    retention: Retention
    chain: Callable[[], Sequence[CommitRecord]]
    in_use: Callable[[], Collection[int]]
    """Versions that workers have said they use."""

    async def look_for_ever(self) -> None:
        seen = 0
        while True:
            await asyncio.sleep(LOOK_S)
            if len(self.chain()) != seen:
                seen = len(self.chain())
                try:
                    await self.look()
                except Unavailable as error:
                    log.warning("store_unavailable", error=str(error))
                    seen = 0

    async def look(self) -> None:
        """Raises Unavailable if the store does not answer."""
        chain = list(self.chain())
        if not chain:
            return
        wanted = await wanted_evaluations(self.store, self.run)
        retention = replace(self.retention, evaluate_every=wanted or self.retention.evaluate_every)
        measured = await measured_versions(self.store, self.run)
        in_use = self.in_use()
        kept = retention.kept(chain[-1].policy.version, in_use=in_use, measured=measured)
        folders = (weights_folder(self.run), checkpoints_folder(self.run))
        there = {key for folder in folders for key in await self.store.keys(folder)}
        old = sorted(there & deletable(chain, kept))
        if old:
            await self.store.delete(old)
            log.info("old_versions_deleted", objects=len(old), kept=len(kept))
