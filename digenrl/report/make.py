"""Makes the report of a run from its object store alone."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from digenrl.evaluation.records import EvaluationRecord, Quality, alarms
from digenrl.report.stills import first_of_prompts, side_of, stills_of
from digenrl.report.summary import (
    EvaluatedVersion,
    ScheduleSummary,
    Summary,
    read_schedule,
    schedule_rows,
)
from shared.errors import DigenRLError, IntegrityError, UserError
from shared.learning.metrics import ALARMING_RATIO_ERROR
from shared.process.settings import ClientSettings, ServiceSettings
from shared.process.worker_process import prepare_libraries
from shared.recipe.recipe import Recipe
from shared.recipe.rewards import ScorerTable
from shared.run.commits import CommitRecord, commit_chain
from shared.run.run_recipe import needed_recipe
from shared.store import ObjectStore, open_store

if TYPE_CHECKING:
    from torch import Tensor

    from digenrl.evaluation.run import RunEvaluator


POLL_S = 2.0
CLASSIFIER = "digit-probability"
"""Reward whose classifier also gives an accuracy."""
VIDEOS = 8
"""Number of prompts whose videos are saved."""
FILES = (
    "summary.json", "curve.png", "gallery.png", "evaluations.png", "progress.png", "adapter"
)  # fmt: skip
"""Files and folders that a report may write, apart from videos."""
FIELDS = (
    "reward", "proxy_accuracy", "gold_accuracy", "gold_svm_accuracy", "gold_worst_digit",
    "gold_nn", "gold_div",
)  # fmt: skip
"""Fields of `Quality` that the report shows."""


def rows_of(recipe: Recipe) -> dict[str, str]:
    """Return label -> field of `Quality`; labels name the rewards that were trained on."""
    scorers = recipe.reward.scorers
    trained_on = {scorer.type for scorer in scorers}
    classifier = "training classifier" if CLASSIFIER in trained_on else "classifier, not trained on"
    labels = (
        f"training reward: {' + '.join(_scorer(each) for each in scorers)}",
        f"proxy accuracy ({classifier})",
        "gold accuracy (held-out MLP)",
        "gold accuracy (held-out SVM)",
        "gold accuracy, worst digit",
        "nn: distance to real images",
        "div: distance within a digit",
    )
    return dict(zip(labels, FIELDS, strict=True))


def _scorer(scorer: ScorerTable) -> str:
    weight = "" if scorer.weight == 1 else f"{scorer.weight:g} x "
    return f"{weight}{scorer.type}"


async def make_report(
    run: str, out: Path, *, scheduler: str, wall_seconds: float, console: Console
) -> Summary:
    """Write summary.json, pictures and adapter/ with its model card into ``out``; print the table.

    With ``scheduler``, the address of its API, wait first until the run has finished.

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
    console.print("evaluating before and after at the same seeds ...", highlight=False)
    summary = await _measure(store, recipe, chain, out, console, wall_seconds=wall_seconds)
    await asyncio.to_thread((out / "summary.json").write_text, summary.model_dump_json(indent=1))
    console.print(table_of(summary, rows_of(recipe)))
    for alarm in summary.alarms:
        console.print(f"reward hacking? {alarm}", style="bold red")
    for warning in summary.warnings:
        console.print(warning, style="bold red", highlight=False)
    for path in await asyncio.to_thread(_written, out):
        console.print(f"{path}", highlight=False, soft_wrap=True)
    return summary


def _written(out: Path) -> list[Path]:
    return [out / name for name in FILES if (out / name).exists()]


async def _measure(
    store: ObjectStore,
    recipe: Recipe,
    chain: list[CommitRecord],
    out: Path,
    console: Console,
    *,
    wall_seconds: float,
) -> Summary:
    prepare_libraries(recipe, threads=recipe.evaluation.threads)
    from digenrl.evaluation.run import RunEvaluator
    from digenrl.report.card import write_card
    from digenrl.report.export import export_adapter, export_network
    from digenrl.report.pictures import draw_curve, draw_evaluations, draw_gallery, draw_progress

    began = time.monotonic()
    with EvaluationBar(console) as shown:
        evaluator = RunEvaluator(store, recipe, worker="report", progress=shown.progress)
        shown.version(chain[0].policy.version)
        before = await evaluator.record_of(chain[0])
        shown.version(chain[-1].policy.version)
        chain, after, weights = await _newest(store, recipe, evaluator, chain)
        not_averaged = await _not_averaged(store, recipe, evaluator, chain[-1])
    last = chain[-1].policy.version
    evaluated = [each for each in await evaluator.evaluations.read_all() if each.version <= last]
    export = export_network if recipe.model.trained == "full" else export_adapter
    summary = summarise(
        recipe,
        chain,
        await read_schedule(store, chain),
        evaluated,
        adapter_sha256=export(out / "adapter", weights, recipe),
        wall_seconds=wall_seconds,
        report_seconds=time.monotonic() - began,
        not_averaged=not_averaged,
    )
    draw_curve(out / "curve.png", chain, summary)
    write_card(out / "adapter", recipe, summary, out / "curve.png", rows_of(recipe))
    draw_gallery(out / "gallery.png", *[await side_of(store, each) for each in (before, after)])
    if len(evaluated) > 2:
        draw_evaluations(out / "evaluations.png", evaluated)
        draw_progress(out / "progress.png", await stills_of(store, evaluated))
    await _save_videos(store, out / "videos", {"before": before, "after": after})
    return summary


async def _newest(
    store: ObjectStore, recipe: Recipe, evaluator: "RunEvaluator", chain: list[CommitRecord]
) -> "tuple[list[CommitRecord], EvaluationRecord, dict[str, Tensor]]":
    """Return the commits up to the newest version, its evaluation and its weights. If the run goes
    on and deletes these weights meanwhile, use the next newest version."""
    from digenrl.evaluation.run import weights_to_use, with_weights_to_use

    while True:
        try:
            chain = await with_weights_to_use(store, recipe, chain)
            weights = await weights_to_use(store, recipe, chain[-1])
            return chain, await evaluator.record_of(chain[-1]), weights
        except IntegrityError:
            newer = await commit_chain(store, chain[-1].run)
            if len(await with_weights_to_use(store, recipe, newer)) == len(chain):
                raise
            chain = newer


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
    schedule: ScheduleSummary,
    evaluated: Sequence[EvaluationRecord],
    *,
    adapter_sha256: str,
    wall_seconds: float,
    report_seconds: float,
    not_averaged: Quality | None = None,
) -> Summary:
    """Build the summary; ``evaluated`` begins with the first version and ends with the last.

    Args:
        not_averaged: figures of the last version's trained weights, if it is their moving average
            that is evaluated.
    """
    before, after = evaluated[0].quality, evaluated[-1].quality
    trained = [record for record in chain if record.trained]
    exact = recipe.largest_weight is None
    pairs = {
        f"{name}_{when}": getattr(quality, name)
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
        reward_per_step=[round(record.metrics["reward_mean"], 6) for record in trained],
        onpolicy_ratio_error_max=max(r.metrics["onpolicy_ratio_error"] for r in trained),
        adapter_sha256=adapter_sha256,
        weights_digest=chain[-1].learned.digest,
        alarms=alarms([record.quality for record in evaluated]),
        effective_sample_share_min=None if exact else _smallest_share(trained),
        warnings=ratio_warnings(trained) if exact else [],
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


def ratio_warnings(trained: Sequence[CommitRecord]) -> list[str]:
    """Return a warning if the largest on-policy ratio error exceeds what rounding explains."""
    errors = {r.policy.version: r.metrics["onpolicy_ratio_error"] for r in trained}
    version = max(errors, key=lambda each: errors[each])
    if errors[version] <= ALARMING_RATIO_ERROR:
        return []
    return [
        f"on-policy ratios were off by {errors[version]:.2g} in step {version}: rollout and "
        "trainer compute different values from the same weights"
    ]


def table_of(summary: Summary, rows: Mapping[str, str]) -> Table:
    table = Table(title=f"{summary.run}: {summary.steps} optimizer steps, {summary.wall_s:.0f} s")
    table.add_column("", no_wrap=True)
    raw = summary.after_not_averaged
    for column in ("before", "after", "change", *(["not averaged"] if raw else [])):
        table.add_column(column, justify="right")
    versions = (summary.before, summary.after, raw or summary.after)
    figures = {
        label: [getattr(quality, name) for quality in versions] for label, name in rows.items()
    } | {
        f"gold: {name} (never trained on)": [quality.gold[name] for quality in versions]
        for name in summary.after.gold
    }
    for label, (before, after, itself) in figures.items():
        if before is not None:
            last = [f"{itself:.3f}"] if raw else []
            table.add_row(label, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}", *last)
    error, share = summary.onpolicy_ratio_error_max, summary.effective_sample_share_min
    table.add_row("largest on-policy |ratio - 1|", "", f"{error:.1e}", "")
    if share is not None:
        table.add_row("smallest effective sample share", "", f"{share:.0%}", "")
    for label, value in schedule_rows(summary.schedule):
        table.add_row(label, "", value, "")
    return table


async def _wait_for_finish(scheduler: str) -> None:
    settings = ClientSettings()
    async with httpx.AsyncClient(headers=settings.headers, verify=settings.trusted) as client:
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


class EvaluationBar:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("evaluating {task.description}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn("prompts"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def version(self, number: int) -> None:
        """Show that the evaluation of a version begins."""
        name = f"version {number}"
        self._bars.add_task(name, total=None)
        if not self._console.is_terminal:
            self._console.print(f"evaluating {name}", highlight=False)

    def progress(self, done: int, total: int) -> None:
        """Show how many prompts of that version are done. May be called in any thread."""
        self._bars.update(self._bars.task_ids[-1], completed=done, total=total)
