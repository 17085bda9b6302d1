"""Makes one picture of each finished evaluation, for panels of TensorBoard and Weights & Biases."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from digenrl.evaluation.records import EvaluationRecord, Evaluations, KeptSample
from shared.errors import ContractError
from shared.run.log import Log
from shared.run.log_entries import Evaluation
from shared.store import ObjectStore

SAMPLES = 16
"""Most samples of a panel: the first of each prompt, then the others."""
SIDE = 256
"""Largest height and width of a sample in a panel, in pixels."""
TAG = "samples"


@dataclass(frozen=True, slots=True)
class FinishedEvaluation:
    """Holds a finished evaluation."""

    tag: str
    """Name of its panel: evaluations at the same settings share it."""
    entry: Evaluation
    record: EvaluationRecord


@dataclass(frozen=True, slots=True)
class Panel:
    """Holds the picture of an evaluation."""

    png: bytes
    height: int
    width: int
    caption: str
    """The prompts of its samples, row by row."""


@dataclass(slots=True)
class AnnouncedEvaluations:
    """Reads finished evaluations of a run in the order in which they were announced."""

    store: ObjectStore
    run: str
    log: Log
    _num_read: int = 0
    _first: str = ""
    """Settings of the first one."""

    async def next(self, version: int) -> FinishedEvaluation | None:
        """Return the next evaluation; None before there is one, or if it belongs to a later
        version."""
        await self.log.look()
        for entry in self.log.numbered[self._num_read :]:
            if isinstance(entry, Evaluation):
                if entry.version > version:
                    return None
                record = await self._record(entry)
                if record is not None:
                    self._num_read += 1
                    self._first = self._first or entry.settings
                    is_first = entry.settings == self._first
                    return FinishedEvaluation(
                        TAG if is_first else f"{TAG} {entry.settings[:6]}", entry, record
                    )
            self._num_read += 1
        return None

    async def _record(self, entry: Evaluation) -> EvaluationRecord | None:
        try:
            return await Evaluations(self.store, self.run, entry.settings).read(entry.version)
        except ContractError:
            return None  # a damaged one is no reason to write no metrics


async def panel_of(store: ObjectStore, record: EvaluationRecord) -> Panel | None:
    """Return the picture of an evaluation's samples; None if it has none."""
    chosen = shown_samples(record.samples)
    if not chosen:
        return None
    pictures = [await store.get(sample.still) for sample in chosen]
    return drawn(pictures, [sample.prompt for sample in chosen])


def shown_samples(samples: Sequence[KeptSample]) -> list[KeptSample]:
    """Return as many samples as a panel has, of as many prompts as possible."""
    counts: dict[str, int] = {}
    ranked: list[tuple[int, int]] = []
    for place, sample in enumerate(samples):
        counts[sample.prompt] = counts.get(sample.prompt, 0) + 1
        ranked.append((counts[sample.prompt], place))
    return [samples[place] for place in sorted(each for _, each in sorted(ranked)[:SAMPLES])]


def drawn(pictures: Sequence[bytes], prompts: Sequence[str]) -> Panel:
    """Return PNGs side by side, as near to a square as possible."""
    from PIL import Image  # what writes no pictures does not need it

    tiles = [Image.open(BytesIO(each)).convert("RGB") for each in pictures]
    for tile in tiles:
        tile.thumbnail((SIDE, SIDE))
    columns = math.ceil(math.sqrt(len(tiles)))
    height, width = max(tile.height for tile in tiles), max(tile.width for tile in tiles)
    rows = math.ceil(len(tiles) / columns)
    whole = Image.new("RGB", (columns * width, rows * height))
    for place, tile in enumerate(tiles):
        whole.paste(tile, (place % columns * width, place // columns * height))
    file = BytesIO()
    whole.save(file, format="PNG")
    return Panel(file.getvalue(), whole.height, whole.width, "; ".join(prompts))
