"""Fetches the pictures of evaluations from the run's object store."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from digenrl.evaluation.media import Pixels, from_png
from digenrl.evaluation.records import EvaluationRecord, KeptSample
from shared.messages.contracts import ObjectRef
from shared.store import ObjectStore

GETS_AT_ONCE = 8
PROMPTS = 8
"""Number of prompts that show the progress of a run."""


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Holds the samples of one side of the comparison, before or after."""

    stills: Pixels
    """(n, C, H, W)"""
    prompts: list[str]
    right: npt.NDArray[np.bool_] | None
    """(n,) whether the held-out classifier recognizes each sample; None without a classifier."""
    sources: Pixels | None = None
    """(n, C, H, W) source images; None without any."""


@dataclass(frozen=True, slots=True)
class Stills:
    """Holds the first sample of several prompts, from one version."""

    version: int
    images: Pixels
    """(prompts, C, H, W)"""


async def read_samples(store: ObjectStore, record: EvaluationRecord) -> SampleSet:
    judged = [sample.right for sample in record.samples if sample.right is not None]
    return SampleSet(
        stills=await _fetch(store, record.samples),
        prompts=[sample.prompt for sample in record.samples],
        right=np.array(judged) if len(judged) == len(record.samples) else None,
        sources=await _sources(store, record.samples),
    )


async def read_stills(store: ObjectStore, records: Sequence[EvaluationRecord]) -> list[Stills]:
    chosen = [list(first_per_prompt(record).values())[:PROMPTS] for record in records]
    return [
        Stills(record.version, await _fetch(store, samples))
        for record, samples in zip(records, chosen, strict=True)
    ]


def first_per_prompt(record: EvaluationRecord) -> dict[str, KeptSample]:
    """Return the first sample of each prompt, and of each image that it edits."""
    firsts: dict[str, KeptSample] = {}
    for sample in record.samples:
        edited = "" if sample.source is None else sample.source.sha256
        firsts.setdefault(sample.prompt + edited, sample)
    return firsts


async def _sources(store: ObjectStore, samples: Sequence[KeptSample]) -> Pixels | None:
    refs = [sample.source for sample in samples if sample.source is not None]
    return await _pixels(store, refs) if refs and len(refs) == len(samples) else None


async def _fetch(store: ObjectStore, samples: Sequence[KeptSample]) -> Pixels:
    return await _pixels(store, [sample.still for sample in samples])


async def _pixels(store: ObjectStore, refs: Sequence[ObjectRef]) -> Pixels:
    limit = asyncio.Semaphore(GETS_AT_ONCE)

    async def fetch(ref: ObjectRef) -> bytes:
        async with limit:
            return await store.get(ref)

    pngs = await asyncio.gather(*map(fetch, refs))
    return np.stack([from_png(png) for png in pngs])
