"""Interface between a member and its device; `services.trainer.fluid.device` implements it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from services.trainer.fluid.exchange import Sum
from shared.devices.protocols import GroupData, Snapshot
from shared.messages.fluid import Piece
from shared.messages.records import Level
from shared.messages.workers import MemoryShortage
from shared.run.manifest import StoredTensors


@dataclass(frozen=True, slots=True)
class TotalMeasure:
    """A member's report about a total that it holds."""

    sum_id: str
    norm: float | None
    scale: float
    level: Level = "exact"

    @property
    def finite(self) -> bool:
        return self.norm is not None


class FluidDevice(Protocol):
    """Trains, sums and steps with the weights that it also generates with. One call at a time, but
    `own_sum` and `measure` touch no weights. Where it `steps_concurrently`, nor do `step` and
    `weights`: a second set of weights is made concurrently with the one in use, which generates
    until `take`, and is kept afterwards."""

    @property
    def steps_concurrently(self) -> bool:
        """Whether it has a second set of weights."""

    @property
    def pass_rows(self) -> int:
        """Rows (sample, step) of the next training pass at most."""

    def weights_digest(self) -> str:
        """Return the digest of what samples the newest version, by which that is named."""

    async def checksum(self) -> str:
        """Return the checksum of the newest weights, their moments, average and old policy."""

    def take(self) -> None:
        """Use the weights of the last concurrent step."""

    def before(self) -> AbstractContextManager[None]:
        """Use the weights of the version before meanwhile."""

    async def restore(self, weights: StoredTensors, checkpoint: StoredTensors) -> None:
        """Take over a committed version; raises IntegrityError if it is one of other weights."""

    def begin(self) -> None:
        """Empty the sum."""

    async def train(self, group: GroupData, piece: Piece) -> MemoryShortage | None:
        """Add the gradient of a piece; return what did not fit at first, if anything.

        Raises:
            ContractError: if the fragments do not make up a group of this run.
            Untrainable, OutOfMemory: if a part of it may be in the sum, which is then spoilt.
        """

    async def skip(self, piece: Piece) -> None:
        """Count the rows of a piece without a gradient."""

    async def own_sum(self) -> Sum:
        """Copy the sum."""

    async def measure(self, total: Any) -> TotalMeasure:
        """Measure a total: its checksum, and the inputs of the step.

        Raises:
            BatchFailed: if these weights cannot be trained on its rows.
        """

    async def step(self, batch: int, total: Any, measure: TotalMeasure) -> Mapping[str, float]:
        """Take the elementwise step of the batch's next update, with norm and scale of ``measure``;
        return its metrics. The last one makes a version; those before are gone with `restore`."""

    async def weights(self) -> Snapshot:
        """Copy the newest weights and their optimizer as they stand."""
