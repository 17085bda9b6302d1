"""Sums up how a run's devices were used, from the scheduler's record of each batch."""

from collections import Counter
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from shared.run.usage import BUSY_USES, BatchUsage, TagUsage, count_staleness, seconds_per_step

Staleness = Iterable[tuple[int, int]]
"""Pairs of a staleness and the number of samples that have it."""


class TagDecision(TagUsage):
    """Records what TAG decided for a batch, and the result."""

    batch: int


class ScheduleSummary(BaseModel):
    """Use of the devices in the batches that one scheduler handled from open to commit."""

    num_batches: int
    seconds_per_step: float | None
    """Median step time."""
    utilisation: float | None
    """Share of their time that rollout and trainer devices generate, train or commit."""
    utilisation_by_device: dict[str, float]
    """Utilisation of each worker, including reward workers."""
    bubbles: dict[str, float]
    """Share of the time of rollout and trainer devices by what they wait for."""
    staleness: dict[int, int]
    """Number of trained samples by staleness."""
    samples_helped: int
    """Samples that the trainer's device generated."""
    tag: list[TagDecision]


def summarise_schedule(steps: Iterable[Staleness], usage: Sequence[BatchUsage]) -> ScheduleSummary:
    """Summarise the usage, without the first batch if there are others: devices still start.

    Args:
        steps: for each step, the staleness of its samples.
    """
    steady = usage[1:] or usage
    by_device: dict[str, Counter[str]] = {}
    for batch in steady:
        for device, uses in batch.devices.items():
            by_device.setdefault(device, Counter()).update(uses)
    gpus = {d: uses for d, uses in by_device.items() if "scoring" not in uses}
    together = sum(gpus.values(), Counter())
    whole = sum(together.values())
    return ScheduleSummary(
        num_batches=len(usage),
        seconds_per_step=seconds_per_step(batch.seconds for batch in steady),
        utilisation=_busy_share(together),
        utilisation_by_device={d: _busy_share(uses) or 0.0 for d, uses in by_device.items()},
        bubbles={u: round(s / whole, 4) for u, s in together.items() if u not in BUSY_USES},
        staleness=count_staleness(counts for step in steps for counts in step),
        samples_helped=sum(batch.tag.samples_helped for batch in usage if batch.tag),
        tag=[TagDecision(batch=b.batch, **b.tag.model_dump()) for b in usage if b.tag],
    )


def _busy_share(uses: Counter[str]) -> float | None:
    whole = sum(uses.values())
    return round(sum(uses[use] for use in BUSY_USES) / whole, 4) if whole else None
