"""`digenrl report`: everything that a finished run is judged by, from the object store alone."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from rich.console import Console
from rich.table import Table

from digenrl.report.schedule import read_schedule, schedule_rows
from digenrl.report.summary import Quality, ScheduleSummary, Summary
from shared.commits import CommitRecord, commit_chain
from shared.errors import DigenRLError, UserError
from shared.recipe import Recipe
from shared.run_store import read_recipe
from shared.settings import ServiceSettings
from shared.store import ObjectStore, open_store

if TYPE_CHECKING:
    from digenrl.report.evaluate import Samples

POLL_S = 2.0
VIDEOS = 8
"""Prompts of which videos are kept."""
ROWS = {
    "training reward": "reward",
    "proxy accuracy (training classifier)": "proxy_accuracy",
    "gold accuracy (held-out MLP)": "gold_accuracy",
    "gold accuracy (held-out SVM)": "gold_svm_accuracy",
    "gold accuracy, worst digit": "gold_worst_digit",
    "nn: distance to real images": "gold_nn",
    "div: distance within a digit": "gold_div",
}


async def make_report(run: str, out: Path, *, scheduler: str, wall_seconds: float) -> None:
    """Write summary.json, curve.png, gallery.png and adapter/ with its model card into ``out``, and
    print the table.

    With ``scheduler``, first wait for the run behind that API to finish.

    Raises:
        UserError: if the store holds no such run, or nothing was trained yet.
    """
    began = time.monotonic()
    if scheduler:
        await _wait_for_finish(scheduler)
        wall_seconds = time.monotonic() - began
    store = open_store(ServiceSettings(run=run).store)
    recipe = await read_recipe(store, run)
    chain = await commit_chain(store, run)
    if recipe is None or len(chain) < 2:
        raise UserError(f"--run: the store holds no trained run {run!r}")
    await asyncio.to_thread(out.mkdir, parents=True, exist_ok=True)
    console = Console()
    console.print("evaluating before and after at the same seeds ...", highlight=False)
    summary = await _measure(store, recipe, chain, out, wall_seconds=wall_seconds)
    await asyncio.to_thread((out / "summary.json").write_text, summary.model_dump_json(indent=1))
    console.print(_table(summary))
    for alarm in summary.alarms:
        console.print(f"reward hacking? {alarm}", style="bold red")
    for name in ("summary.json", "curve.png", "gallery.png", "adapter"):
        console.print(f"{out / name}", highlight=False, soft_wrap=True)


async def _measure(
    store: ObjectStore, recipe: Recipe, chain: list[CommitRecord], out: Path, *, wall_seconds: float
) -> Summary:
    from digenrl.report.card import write_card
    from digenrl.report.evaluate import Evaluator, quality, taken_for_right
    from digenrl.report.export import export_adapter
    from digenrl.report.export_network import export_network
    from digenrl.report.pictures import Side, draw_curve, draw_gallery
    from digenrl.report.weights import weights_to_use
    from shared.diffusion.tensors import unpack

    began = time.monotonic()
    first, last = [await weights_to_use(store, recipe, each) for each in (chain[0], chain[-1])]
    evaluator = await asyncio.to_thread(Evaluator, recipe)
    before = await asyncio.to_thread(evaluator.sample, first)
    after = await asyncio.to_thread(evaluator.sample, last)
    export = export_network if recipe.model.trained == "full" else export_adapter
    summary = summarise(
        recipe,
        chain,
        await read_schedule(store, chain),
        quality(recipe, before),
        quality(recipe, after),
        adapter_sha256=export(out / "adapter", unpack(last), recipe),
        wall_seconds=wall_seconds,
        report_seconds=time.monotonic() - began,
    )
    draw_curve(out / "curve.png", chain, summary)
    write_card(out / "adapter", recipe, summary, out / "curve.png", ROWS)
    sides = [Side(samples, taken_for_right(recipe, samples)) for samples in (before, after)]
    draw_gallery(out / "gallery.png", *sides)
    _save_videos(out / "videos", {"before": before, "after": after})
    return summary


def _save_videos(folder: Path, sides: Mapping[str, "Samples"]) -> None:
    """The first one of each prompt, before and after, for a model of videos."""
    from digenrl.media import save

    for when, samples in sides.items():
        if samples.images.ndim == 4:
            continue
        firsts = dict(zip(reversed(samples.prompts), reversed(samples.images), strict=True))
        for number, video in enumerate(list(reversed(firsts.values()))[:VIDEOS]):
            save(folder, f"{number:02d}-{when}", video)


def summarise(
    recipe: Recipe,
    chain: list[CommitRecord],
    schedule: ScheduleSummary,
    before: Quality,
    after: Quality,
    *,
    adapter_sha256: str,
    wall_seconds: float,
    report_seconds: float,
) -> Summary:
    trained = [record for record in chain if record.trained]
    pairs = {
        f"{name}_{when}": getattr(quality, name)
        for when, quality in (("before", before), ("after", after))
        for name in ROWS.values()
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
        weights_digest=chain[-1].policy.weights_digest,
        alarms=alarms(before, after),
        schedule=schedule,
        before=before,
        after=after,
        **pairs,
    )


def alarms(before: Quality, after: Quality) -> list[str]:
    """A line for each gold reward that fell while the training reward rose."""
    if after.reward <= before.reward:
        return []
    return [
        f"the training reward rose from {before.reward:.4g} to {after.reward:.4g} while the gold "
        f"reward {name} fell from {before.gold[name]:.4g} to {value:.4g}"
        for name, value in after.gold.items()
        if value < before.gold[name]
    ]


def _table(summary: Summary) -> Table:
    table = Table(title=f"{summary.run}: {summary.steps} optimizer steps, {summary.wall_s:.0f} s")
    table.add_column("", no_wrap=True)
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for label, name in ROWS.items():
        before, after = getattr(summary.before, name), getattr(summary.after, name)
        if before is not None:
            table.add_row(label, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    for name, after in summary.after.gold.items():
        before = summary.before.gold[name]
        table.add_row(
            f"gold: {name} (never trained on)",
            f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}",
        )  # fmt: skip
    error = summary.onpolicy_ratio_error_max
    table.add_row("largest on-policy |ratio - 1|", "", f"{error:.1e}", "")
    for label, value in schedule_rows(summary.schedule):
        table.add_row(label, "", value, "")
    return table


async def _wait_for_finish(scheduler: str) -> None:
    async with httpx.AsyncClient() as client:
        while True:
            try:
                run = (await client.get(f"{scheduler}/v1/run", timeout=5)).json()
            except (httpx.HTTPError, ValueError):
                run = {"phase": "unknown"}
            if run["phase"] == "finished":
                return
            if run["phase"] == "failed":
                raise DigenRLError(f"the run has failed: {run['failure']}")
            await asyncio.sleep(POLL_S)
