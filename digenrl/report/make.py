"""Makes the report of a run from its object store alone."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from rich.console import Console

from digenrl.evaluation.records import EvaluationRecord, Quality, alarms
from digenrl.report.output import FIELDS, EvaluationBar, rows_of, table_of
from digenrl.report.stills import first_of_prompts, side_of, stills_of
from digenrl.report.summary import EvaluatedVersion, ScheduleSummary, Summary, read_schedule
from shared.errors import DigenRLError, IntegrityError, UserError
from shared.learning.metrics import nothing_trained, ratios_off
from shared.process.settings import ClientSettings, ServiceSettings
from shared.process.worker_process import prepare_libraries
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, commit_chain
from shared.run.journal import NOBODY_WORKS, Alarm, read_newest
from shared.run.run_recipe import held_out_rows, needed_recipe
from shared.store import ObjectStore, open_store

if TYPE_CHECKING:
    from torch import Tensor

    from digenrl.evaluation.run import RunEvaluator


POLL_S = 2.0
VIDEOS = 8
"""Number of prompts whose videos are saved."""
FILES = (
    "summary.json", "curve.png", "gallery.png", "evaluations.png", "progress.png", "adapter"
)  # fmt: skip
"""Files and folders that a report may write, apart from videos."""


async def make_report(
    run: str, out: Path, *, scheduler: str, wall_seconds: float, console: Console
) -> Summary:
    """Write adapter/ with its model card, pictures and summary.json into ``out``; print the table.

    The adapter comes first, and what fails of the rest fails alone: `Summary.failures` has a line
    for it. With ``scheduler``, the address of its API, wait first until the run has finished.

    Raises:
        UserError: if the store holds no such run, or nothing has been trained yet.
    """
    began = time.monotonic()
    if scheduler:
        await _wait_for_finish(scheduler)
        wall_seconds = time.monotonic() - began
    store = open_store(ServiceSettings(run=run).store)
    recipe = await needed_recipe(store, run)
    chain = await commit_chain(store, run)
    if len(chain) < 2:
        raise UserError(f"--run: {run} has trained nothing yet; report it after its first step")
    await asyncio.to_thread(out.mkdir, parents=True, exist_ok=True)
    parts = Parts()
    summary = await _measure(store, recipe, chain, out, console, parts, wall_seconds=wall_seconds)
    summary.failures = parts.failures
    with parts.part("summary.json"):
        (out / "summary.json").write_text(summary.model_dump_json(indent=1))
    console.print(table_of(summary, rows_of(recipe)))
    for alarm in summary.alarms:
        console.print(f"reward hacking? {alarm}", style="bold red")
    for warning in [*summary.warnings, *(f"failed: {each}" for each in parts.failures)]:
        console.print(warning, style="bold red", highlight=False, markup=False, soft_wrap=True)
    for path in await asyncio.to_thread(_written, out):
        console.print(f"{path}", highlight=False, soft_wrap=True)
    return summary


@dataclass(frozen=True, slots=True)
class Parts:
    """Makes the parts of a report, each of which may fail without the others."""

    failures: list[str] = field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is: the run took hours, and the report has others
            reason = " ".join(str(error).split())
            kind = "" if isinstance(error, DigenRLError) else f"{type(error).__name__}: "
            self.failures.append(f"{name}: {kind}{reason}")


def _written(out: Path) -> list[Path]:
    return [out / name for name in FILES if (out / name).exists()]


async def _measure(
    store: ObjectStore,
    recipe: Recipe,
    chain: list[CommitRecord],
    out: Path,
    console: Console,
    parts: Parts,
    *,
    wall_seconds: float,
) -> Summary:
    prepare_libraries(recipe, threads=recipe.evaluation.threads)
    from digenrl.report.export import export_adapter, export_network

    export = export_network if recipe.model.trained == "full" else export_adapter
    adapter, weights, schedule, evaluation = "", None, None, Evaluation()
    with parts.part("adapter"):
        chain, weights = await _newest(store, recipe, chain)
        adapter = await asyncio.to_thread(export, out / "adapter", weights, recipe)
    began = time.monotonic()
    console.print("evaluating before and after at the same seeds ...", highlight=False)
    with parts.part("evaluation"):
        evaluation = await _evaluate(store, recipe, chain, weights, console)
    with parts.part("schedule"):
        schedule = await read_schedule(store, chain)
    summary = summarise(
        recipe,
        chain,
        schedule,
        evaluation.records,
        adapter_sha256=adapter,
        wall_seconds=wall_seconds,
        report_seconds=time.monotonic() - began,
        not_averaged=evaluation.not_averaged,
        num_held_out=evaluation.num_held_out,
    )
    stood_still = {
        str(entry.reason): None async for _, entry in read_newest(store, recipe.run.name)
        if isinstance(entry, Alarm) and entry.what == NOBODY_WORKS and entry.firing
    }  # fmt: skip
    summary.warnings += stood_still
    await _draw(store, recipe, chain, out, parts, summary, evaluation.records)
    return summary


async def _draw(
    store: ObjectStore,
    recipe: Recipe,
    chain: list[CommitRecord],
    out: Path,
    parts: Parts,
    summary: Summary,
    evaluated: Sequence[EvaluationRecord],
) -> None:
    from digenrl.report.card import write_card
    from digenrl.report.pictures import draw_curve, draw_evaluations, draw_gallery, draw_progress

    with parts.part("curve.png"):
        draw_curve(out / "curve.png", chain, summary)
    if summary.adapter_sha256:
        with parts.part("adapter/README.md"):
            write_card(out / "adapter", recipe, summary, out / "curve.png", rows_of(recipe))
    if not evaluated:
        return
    before, after = evaluated[0], evaluated[-1]
    with parts.part("gallery.png"):
        draw_gallery(out / "gallery.png", *[await side_of(store, each) for each in (before, after)])
    if len(evaluated) > 2:
        with parts.part("evaluations.png"):
            draw_evaluations(out / "evaluations.png", evaluated)
        with parts.part("progress.png"):
            draw_progress(out / "progress.png", await stills_of(store, evaluated))
    with parts.part("videos"):
        await _save_videos(store, out / "videos", {"before": before, "after": after})


async def _newest(
    store: ObjectStore, recipe: Recipe, chain: list[CommitRecord]
) -> "tuple[list[CommitRecord], dict[str, Tensor]]":
    """Return the commits up to the newest version, and its weights. If the run goes on and deletes
    these weights meanwhile, use the next newest version."""
    from digenrl.evaluation.run import weights_to_use, with_weights_to_use

    while True:
        try:
            chain = await with_weights_to_use(store, recipe, chain)
            return chain, await weights_to_use(store, recipe, chain[-1])
        except IntegrityError:
            newer = await commit_chain(store, chain[-1].run)
            if len(await with_weights_to_use(store, recipe, newer)) == len(chain):
                raise
            chain = newer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Holds what was measured of a run's versions; nothing if that has failed."""

    records: Sequence[EvaluationRecord] = ()
    """Begins with the first version and ends with the last."""
    not_averaged: Quality | None = None
    num_held_out: int = 0
    """Number of evaluated prompts that were not trained."""


async def _evaluate(
    store: ObjectStore,
    recipe: Recipe,
    chain: list[CommitRecord],
    weights: "dict[str, Tensor] | None",
    console: Console,
) -> Evaluation:
    """Evaluate the first version and the last, whose weights are ``weights``."""
    from digenrl.evaluation.run import RunEvaluator

    with EvaluationBar(console) as shown:
        evaluator = RunEvaluator(store, recipe, worker="report", progress=shown.progress)
        shown.version(chain[0].policy.version)
        await evaluator.record_of(chain[0])
        last = chain[-1].policy.version
        shown.version(last)
        await evaluator.record_of(chain[-1], weights)
        not_averaged = await _not_averaged(store, recipe, evaluator, chain[-1])
    found = await evaluator.evaluations.read_all()
    records = [each for each in found if each.version <= last]
    return Evaluation(records, not_averaged, len(held_out_rows(recipe)))


async def _not_averaged(
    store: ObjectStore, recipe: Recipe, evaluator: "RunEvaluator", newest: CommitRecord
) -> Quality | None:
    """Return the figures of the newest version's trained weights themselves, where its record, and
    what is exported, are of their moving average."""
    from digenrl.evaluation.run import trained_weights

    if recipe.trainer.ema is None:
        return None
    return await evaluator.quality_of(await trained_weights(store, newest))


async def _save_videos(
    store: ObjectStore, folder: Path, sides: Mapping[str, EvaluationRecord]
) -> None:
    """Save the first video of each prompt, before and after, if the model makes videos."""
    for when, record in sides.items():
        firsts = list(first_of_prompts(record).values())[:VIDEOS]
        for number, sample in enumerate(firsts):
            if sample.media != sample.still:
                video = await store.get(sample.media)
                await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
                path = folder / f"{number:02d}-{when}.mp4"
                await asyncio.to_thread(path.write_bytes, video)


def summarise(
    recipe: Recipe,
    chain: list[CommitRecord],
    schedule: ScheduleSummary | None,
    evaluated: Sequence[EvaluationRecord],
    *,
    adapter_sha256: str,
    wall_seconds: float,
    report_seconds: float,
    not_averaged: Quality | None = None,
    num_held_out: int = 0,
) -> Summary:
    """Build the summary; ``evaluated`` begins with the first version and ends with the last, or is
    empty.

    Args:
        not_averaged: figures of the last version's trained weights, if it is their moving average
            that is evaluated.
        num_held_out: number of evaluated prompts that were not trained.
    """
    before, after = (evaluated[at].quality if evaluated else None for at in (0, -1))
    trained = [record for record in chain if record.trained]
    measured = [(record.policy.version, record.metrics) for record in trained]
    exact = recipe.largest_weight is None
    pairs: dict[str, Any] = {
        f"{name}_{when}": getattr(quality, name, None)
        for when, quality in (("before", before), ("after", after))
        for name in FIELDS
    }
    return Summary(
        run=recipe.run.name,
        seed=recipe.run.seed,
        steps=chain[-1].policy.version,
        commits=len(trained),
        wall_s=round(wall_seconds, 1),
        report_s=round(report_seconds, 1),
        samples_trained=sum(len(group.rewards) for record in trained for group in record.trained),
        num_held_out=num_held_out,
        reward_per_step=[round(record.metrics["reward_mean"], 6) for record in trained],
        onpolicy_ratio_error_max=max(r.metrics["onpolicy_ratio_error"] for r in trained),
        adapter_sha256=adapter_sha256,
        weights_digest=chain[-1].learned.digest,
        alarms=alarms([record.quality for record in evaluated]),
        effective_sample_share_min=None if exact else _smallest_share(trained),
        warnings=[*(ratios_off(measured) if exact else []), *nothing_trained(measured)],
        evaluations=[
            EvaluatedVersion(
                version=record.version, quality=record.quality, alarms=list(record.alarms)
            )
            for record in evaluated
        ],
        schedule=schedule,
        before=before,
        after=after,
        after_not_averaged=not_averaged,
        **pairs,
    )


def _smallest_share(trained: Sequence[CommitRecord]) -> float:
    return round(min(r.metrics["effective_sample_share"] for r in trained), 6)


async def _wait_for_finish(scheduler: str) -> None:
    settings = ClientSettings()
    headers, trusted = settings.headers, settings.trusted
    async with httpx.AsyncClient(headers=headers, verify=trusted, trust_env=False) as client:
        while True:
            try:
                answer = await client.get(f"{scheduler}/v1/run", timeout=5)
                run = answer.json()
            except (httpx.HTTPError, ValueError):
                run = {"phase": "unknown"}
            else:
                if answer.is_client_error:
                    raise UserError(f"--scheduler: {scheduler} refuses: {run.get('detail')}")
            if run.get("phase") == "finished":
                return
            if run.get("phase") == "failed":
                raise DigenRLError(f"the run has failed: {run['failure']}")
            await asyncio.sleep(POLL_S)
