"""A run in a folder of objects, without the services that make one."""

import asyncio
import os
from pathlib import Path

from shared.process.settings import ServiceSettings
from shared.recipe.recipe import load_recipe, override
from shared.run.commits import CommitRecord, commit
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests import examples
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe

RUN = "test"


class Run:
    def __init__(self, objects: Path, trainer: str = "trainer-0") -> None:
        self.store = ObjectStore(FolderBackend(objects))
        self.settings = ServiceSettings(run=RUN, store_url=f"file://{objects}")
        self.trainer = trainer
        self.head: CommitRecord | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a process that reads the run."""
        return {**os.environ, "DIGENRL_STORE_URL": self.settings.store_url}

    def begin(self) -> "Run":
        recipe = override(load_recipe(DIGITS), {"run.name": RUN})
        asyncio.run(store_recipe(self.store, recipe))
        self.commit(1)
        return self

    def commit(self, count: int) -> None:
        for _ in range(count):
            version = 0 if self.head is None else self.head.policy.version + 1
            metrics = metrics_of(version) if version else {}
            self.head = examples.record(
                version, self.head, run=RUN, metrics=metrics, worker=self.trainer
            )
            asyncio.run(commit(self.store, self.head))


def metrics_of(step: int) -> dict[str, float]:
    """Numbers that are exact in 32 bits."""
    return {"reward_mean": step / 4, "reward_mean/proxy": step / 8, "loss": -step * 0.5}
