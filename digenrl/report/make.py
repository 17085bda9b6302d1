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
from digenrl.reading.schedule import ScheduleSummary
from digenrl.report.output import FIELDS, EvaluationBar, figure_fields, make_table
from digenrl.report.stills import first_per_prompt, read_samples, read_stills
from digenrl.report.summary import EvaluatedVersion, Summary, read_schedule
from shared.errors import DigenRLError, IntegrityError, UserError
from shared.learning.metrics import nothing_trained, ratios_off
from shared.process.settings import ClientSettings, ServiceSettings
from shared.process.worker_process import prepare_libraries
from shared.recipe.recipe import Recipe
from shared.run.commits import CommitRecord, commit_chain
from shared.run.log import Log
from shared.run.log_entries import NO_DEVICE_WORKS, Alarm
from shared.run.run_recipe import held_out_rows, needed_recipe
from shared.store import ObjectStore, open_store

if TYPE_CHECKING:
    from torch import Tensor


POLL_S = 2.0
VIDEOS = 8
"""Number of prompts whose videos are saved."""
FILES = (
    "summary.json", "curve.png", "gallery.png", "evaluations.png", "progress.png", "adapter"
)  # fmt: skip
"""Files and folders that a report may write, apart from videos."""


async def make_report(
    run: str, out: Path, *, scheduler: str, wall_seconds: float, console: Console
) -> tuple[Summary, Recipe]:
    """Write adapter/ with its model card, pictures and summary.json into ``out``; print the table.
    Return what summary.json has, and the run's recipe.

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
    summary = await Report(store, recipe, chain, out, console).make(wall_seconds)
    console.print(make_table(summary, figure_fields(recipe)))
    alarms = [f"reward hacking? {alarm}" for alarm in summary.alarms]
    for line in [*alarms, *summary.warnings, *(f"failed: {each}" for each in summary.failures)]:
        console.print(line, style="bold red", highlight=False, soft_wrap=True)
    for path in [out / name for name in FILES if (out / name).exists()]:
        console.print(f"{path}", highlight=False, soft_wrap=True)
    return summary, recipe


@dataclass(slots=True)
class Report:
    """Makes the parts of a report: the adapter first, and each of the others even if one fails."""

    store: ObjectStore
    recipe: Recipe
    chain: list[CommitRecord]
    out: Path
    console: Console
    failures: list[str] = field(default_factory=list)
    evaluated: list[EvaluationRecord] = field(default_factory=list)
    """Begins with the first version and ends with the last; empty if the evaluation fails."""
    not_averaged: Quality | None = None
    num_held_out: int = 0
    """Number of evaluated prompts that were not trained."""

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is: the run took hours, and there are other parts
            kind = "" if isinstance(error, DigenRLError) else f"{type(error).__name__}: "
            self.failures.append(f"{name}: {kind}{' '.join(str(error).split())}")

    async def make(self, wall_seconds: float) -> Summary:
        prepare_libraries(self.recipe, threads=self.recipe.evaluation.threads)
        from digenrl.report.export import export_adapter, export_network

        export = export_network if self.recipe.model.trained == "full" else export_adapter
        digest, weights, schedule = "", None, None
        with self._part("adapter"):
            weights = await self._newest()
            digest = await asyncio.to_thread(export, self.out / "adapter", weights, self.recipe)
        began = time.monotonic()
        self.console.print("evaluating before and after at the same seeds ...", highlight=False)
        with self._part("evaluation"):
            await self._evaluate(weights)
        with self._part("schedule"):
            schedule = await read_schedule(self.store, self.chain)
        summary = summarise(
            self.recipe,
            self.chain,
            schedule,
            self.evaluated,
            adapter_sha256=digest,
            wall_seconds=wall_seconds,
            report_seconds=time.monotonic() - began,
            not_averaged=self.not_averaged,
            num_held_out=self.num_held_out,
        )
        with self._part("warnings"):
            log = Log.of_run(self.store, self.recipe.run.name)
            await log.look()
            summary.warnings += {
                f"while the run was in progress: {entry.reason}": None
                for entry in log.newest_first
                if isinstance(entry, Alarm) and entry.what == NO_DEVICE_WORKS and entry.firing
            }
        await self._draw(summary)
        summary.failures = self.failures
        with self._part("summary.json"):
            (self.out / "summary.json").write_text(summary.model_dump_json(indent=1))
        return summary

    async def _newest(self) -> "dict[str, Tensor]":
        """Return the weights of the newest version, which ends the chain. If the run deletes these
        weights in the meantime, use the next newest version."""
        from digenrl.evaluation.run import weights_to_use

        while True:
            try:
                return await weights_to_use(self.store, self.recipe, self.chain[-1])
            except IntegrityError:
                newer = await commit_chain(self.store, self.chain[-1].run)
                if len(newer) == len(self.chain):
                    raise
                self.chain = newer

    async def _evaluate(self, weights: "dict[str, Tensor] | None") -> None:
        """Evaluate the first version and the last, whose weights are ``weights``. If its record and
        the export use a moving average, measure the trained weights as well."""
        from digenrl.evaluation.run import RunEvaluator, trained_weights

        first, last = self.chain[0], self.chain[-1]
        with EvaluationBar(self.console, self.recipe.evaluation.samples_per_prompt) as shown:
            evaluator = RunEvaluator(
                self.store, self.recipe, worker="report", progress=shown.progress
            )
            shown.version(first.policy.version)
            await evaluator.record_of(first)
            shown.version(last.policy.version)
            await evaluator.record_of(last, weights)
            if self.recipe.trainer.ema is not None:
                trained = await trained_weights(self.store, last)
                self.not_averaged = await evaluator.quality_of(trained)
        evaluations = await evaluator.evaluations.read_all()
        self.evaluated = [each for each in evaluations if each.version <= last.policy.version]
        self.num_held_out = len(held_out_rows(self.recipe))

    async def _draw(self, summary: Summary) -> None:
        from digenrl.report.card import write_card
        from digenrl.report.pictures import (
            draw_curve,
            draw_evaluations,
            draw_gallery,
            draw_progress,
        )

        out, evaluated, curve = self.out, self.evaluated, self.out / "curve.png"
        with self._part("curve.png"):
            draw_curve(curve, self.chain, summary)
        if summary.adapter_sha256:
            with self._part("adapter/README.md"):
                write_card(out / "adapter", self.recipe, summary, curve, figure_fields(self.recipe))
        if evaluated:
            sides = {"before": evaluated[0], "after": evaluated[-1]}
            with self._part("gallery.png"):
                both = [await read_samples(self.store, each) for each in sides.values()]
                draw_gallery(out / "gallery.png", *both)
            with self._part("videos"):
                await _save_videos(self.store, out / "videos", sides)
        if len(evaluated) > 2:
            with self._part("evaluations.png"):
                draw_evaluations(out / "evaluations.png", evaluated)
            with self._part("progress.png"):
                draw_progress(out / "progress.png", await read_stills(self.store, evaluated))


async def _save_videos(
    store: ObjectStore, folder: Path, sides: Mapping[str, EvaluationRecord]
) -> None:
    """Save the first video of each prompt, before and after, if the model makes videos."""
    for when, record in sides.items():
        firsts = list(first_per_prompt(record).values())[:VIDEOS]
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
    empty. ``not_averaged``: figures of the last version's trained weights, if their moving average
    is evaluated; ``num_held_out``: number of evaluated prompts that were not trained."""
    before, after = (evaluated[at].quality if evaluated else None for at in (0, -1))
    trained = [record for record in chain if record.trained]
    measured = [(record.policy.version, record.metrics) for record in trained]
    exact = recipe.largest_weight is None
    return Summary(
        run=recipe.run.name, seed=recipe.run.seed,
        steps=chain[-1].policy.version, commits=len(trained),
        wall_s=round(wall_seconds, 1), report_s=round(report_seconds, 1),
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
            EvaluatedVersion(version=each.version, quality=each.quality, alarms=list(each.alarms))
            for each in evaluated
        ],
        schedule=schedule, before=before, after=after, after_not_averaged=not_averaged,
        **_figures("before", before), **_figures("after", after),
    )  # fmt: skip


def _figures(when: str, quality: Quality | None) -> dict[str, Any]:
    return {
        f"{name}_{when}": value
        for name in FIELDS
        if (value := getattr(quality, name, None)) is not None
    }


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
