"""Numbers finished evaluations in the order in which they were told, for readers of events.

    <run>/evaluations/told/<number>.json     its settings and version, from 1 without gaps

Records alone have no order: evaluations of older versions and of other settings may come later. An
evaluator tells each record that is not told yet whenever it has added one or begins, so one that
was killed between both leaves nothing out; the number is taken by exclusive create after all
numbers before it were read, so two evaluators tell nothing twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.run.layout import evaluations_folder
from shared.store import ObjectStore


class Told(BaseModel):
    """Names an evaluation record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: str
    """Folder of the records at the same settings."""
    version: int


def told_key(run: str, number: int) -> str:
    return f"{evaluations_folder(run)}/told/{number:08d}.json"


async def read_told(store: ObjectStore, run: str, number: int) -> Told | None:
    """Return which evaluation has a number; None if none has it, or it is damaged."""
    data = await store.read(told_key(run, number))
    try:
        return None if data is None else Told.model_validate_json(data)
    except ValidationError:
        return None


@dataclass(slots=True)
class Teller:
    """Tells evaluations of a run, each once."""

    store: ObjectStore
    run: str
    _known: set[Told] = field(default_factory=set)
    _number: int = 0
    """Number of the newest one that was read."""

    async def tell(self, settings: str, versions: Sequence[int]) -> None:
        """Tell those of these versions that were not told yet."""
        await self._read_on()
        for version in sorted(versions):
            told = Told(settings=settings, version=version)
            while told not in self._known:
                key = told_key(self.run, self._number + 1)
                await self.store.create(key, told.model_dump_json().encode())
                await self._read_on()  # it is this one, or what another evaluator has told

    async def _read_on(self) -> None:
        while await self.store.read(told_key(self.run, self._number + 1)) is not None:
            self._number += 1
            found = await read_told(self.store, self.run, self._number)
            if found is not None:
                self._known.add(found)
