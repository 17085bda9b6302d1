"""Defines ``summary.json``, the figures of a run; docs/summary.md describes each field.

How the devices were used is summarised from the scheduler's record of each batch.
"""

import statistics
from collections import Counter

from pydantic import BaseModel, ConfigDict

from digenrl.evaluation.records import Quality
from services.scheduler.core.usage import BUSY, BatchUsage
from shared.run.commits import CommitRecord
from shared.run.layout import named_objects
from shared.store import ObjectStore


class TagDecision(BaseModel):
    """Records what TAG decided for a batch, and the result."""

    batch: int
    groups: int
    """Largest number of groups that the trainer was to generate."""
    samples_helped: int
    """Number of samples that the trainer generated."""
    reason: str
    predicted_gain: float | None
    measured_gain: float | None
    """Gain over the predicted time of the batch without help."""


class ScheduleSummary(BaseModel):
    """Says how the devices were used in the batches that one scheduler saw from open to commit."""

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


class EvaluatedVersion(BaseModel):
    """Holds the evaluation of one policy version."""

    version: int
    quality: Quality
    alarms: list[str]
    """Alarms for this version, compared with those before it."""


class Summary(BaseModel):
    model_config = ConfigDict(extra="allow")  # figures of digits, such as gold_accuracy_before

    run: str
    seed: int
    steps: int
    """Number of optimizer steps."""
    commits: int
    """Number of commit records that trained a batch; equals `steps` unless something is wrong."""
    wall_s: float
    """Seconds from the command to the last commit, counted from the newest start."""
    report_s: float
    samples_trained: int
    onpolicy_ratio_error_max: float
    """Largest |ratio - 1| before the first update, over all batches."""
    effective_sample_share_min: float | None = None
    """Smallest effective share of a batch's samples, if `rollout.weights` are not the trainer's."""
    num_held_out: int = 0
    """Number of evaluated prompts that were not trained; 0: the prompts of training were."""
    reward_per_step: list[float]
    """Mean training reward of each batch."""
    reward_before: float | None = None
    reward_after: float | None = None
    adapter_sha256: str
    """Digest of adapter/pytorch_lora_weights.safetensors; empty if the export has failed."""
    weights_digest: str
    """Digest of the final policy version, as in commit records and trajectories."""
    alarms: list[str] = []
    """A line for each gold reward that fell while the training reward rose, as of the end."""
    warnings: list[str] = []
    """What went wrong: on-policy ratios, steps that trained nothing, times without work."""
    evaluations: list[EvaluatedVersion] = []
    """Evaluations of all evaluated versions, including the first and the last."""
    failures: list[str] = []
    """A line for each part of the report that has failed: its name and the reason."""
    schedule: ScheduleSummary | None
    before: Quality | None
    """None if the evaluation has failed."""
    after: Quality | None
    after_not_averaged: Quality | None = None
    """Figures of the trained weights themselves, if `after` is of their moving average."""


async def read_schedule(store: ObjectStore, chain: list[CommitRecord]) -> ScheduleSummary:
    """Read and summarise a run's usage, without what is damaged of it."""
    keys = await named_objects(store, chain[0].run, "usage")
    usage = [BatchUsage.decode(await store.read(key)) for key in keys]
    return summarise_schedule(chain, [each for each in usage if each is not None])


def summarise_schedule(chain: list[CommitRecord], usage: list[BatchUsage]) -> ScheduleSummary:
    """Summarise the usage, without the first batch if there are others: devices still start."""
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
        seconds_per_step=round(statistics.median(batch.seconds for batch in steady), 3)
        if steady
        else None,
        utilisation=_busy_share(together),
        utilisation_by_device={d: _busy_share(uses) or 0.0 for d, uses in by_device.items()},
        bubbles={
            use: round(seconds / whole, 4) for use, seconds in together.items() if use not in BUSY
        },
        staleness=dict(
            Counter(
                record.batch - group.policy_version
                for record in chain
                if record.batch is not None
                for group in record.trained
                for _ in group.rewards
            )
        ),
        samples_helped=sum(batch.tag.samples_helped for batch in usage if batch.tag),
        tag=[
            TagDecision(batch=batch.batch, **batch.tag.model_dump()) for batch in usage if batch.tag
        ],
    )


def schedule_rows(schedule: ScheduleSummary) -> list[tuple[str, str]]:
    """Return label and value of each row for the report's table."""
    counts = ", ".join(f"{steps}: {count}" for steps, count in sorted(schedule.staleness.items()))
    rows = [("samples by staleness", counts)]
    if schedule.utilisation is not None:
        rows.insert(0, ("devices at work", f"{schedule.utilisation:.0%}"))
    if schedule.samples_helped:
        rows.append(("samples generated by the trainer", str(schedule.samples_helped)))
    return rows


def _busy_share(uses: Counter[str]) -> float | None:
    whole = sum(uses.values())
    return round(sum(uses[use] for use in BUSY) / whole, 4) if whole else None
