"""Serves the scheduler's routes for a run that has ended, from the store.

The routes and their types are the scheduler's; no worker is there, and nothing can be changed.
"""

from fastapi import APIRouter

from digenrl.api.live import LiveRun
from digenrl.api.run_history import LOG_S, RunHistory
from digenrl.reading.ended_runs import load_at_end, run_at_end, tag_at_end
from services.scheduler.core.state import Phase
from services.scheduler.shell import api_batches, committed_views
from services.scheduler.shell.api_batches import VersionView
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import RunView, TagView, WorkerView
from services.scheduler.shell.dead_letters_api import letter_lists
from services.scheduler.sim.staleness import StalenessDecision
from shared.process.http_api import BatchNumber, Before, Limit, existing
from shared.run.layout import staleness_key, weights_folder
from shared.run.log_entries import PhaseChange
from shared.run.usage import BatchUsage, Timeline
from shared.store import ObjectStore


async def run_view(history: RunHistory) -> RunView:
    """Return where a run has ended; at step 0 of 0 if the store holds no such run."""
    await history.look()
    step, recipe = max(0, history.version), history.recipe
    is_whole = recipe is not None and step >= recipe.run.steps
    phase, failure = await _end(history, is_whole=is_whole)
    letters = await history.letters()
    return run_at_end(
        history.run, recipe, history.step_facts, history.recent_usage,
        phase=phase, failure=failure, staleness=await _staleness(history.store, history.run),
        num_open_letters=letters.num_open,
    )  # fmt: skip


async def _end(history: RunHistory, *, is_whole: bool) -> tuple[Phase, str | None]:
    """Return the phase in which a run has ended, and why it has failed, if it has.

    A goal may end a run before its last step: the log records it. A run that is still running in
    the log was killed.
    """
    if is_whole:
        return "finished", None
    await history.log.look(LOG_S)
    changes = (each for each in history.log.newest_first if isinstance(each, PhaseChange))
    newest = next(changes, None)
    if newest is not None and newest.phase == "failed":
        return "failed", newest.failure
    return "finished" if newest is not None and newest.phase == "finished" else "stopped", None


async def _staleness(store: ObjectStore, run: str) -> tuple[int, str] | None:
    """Return what was decided for "auto", and why, if that is stored."""
    data = await store.read(staleness_key(run))
    if data is None:
        return None
    decision = StalenessDecision.model_validate_json(data)
    return decision.max_staleness, decision.reason


async def stored_versions(history: RunHistory, limit: int, before: int | None) -> list[VersionView]:
    """Return the newest versions below ``before``, the newest first."""
    await history.look()
    views = [committed_views.version_view(each) for each in history.steps[:before][-limit:][::-1]]
    return await with_figures(history, views)


async def newest_versions(
    history: RunHistory, live: LiveRun, limit: int, before: int | None = None
) -> list[VersionView]:
    """Return the newest versions below ``before``, with their loading workers if the run is in
    progress."""
    older = "" if before is None else f"&before={before}"
    views = await live.get_as(list[VersionView], f"/v1/versions?limit={limit}{older}")
    if views is None:
        return await stored_versions(history, limit, before)
    await history.look()
    return await with_figures(history, views)


async def with_figures(history: RunHistory, versions: list[VersionView]) -> list[VersionView]:
    """Return versions with what only the store knows: evaluations, and whose weights are kept."""
    kept, best = set(await history.store.keys(weights_folder(history.run))), history.best()
    figures = {} if best is None else best.figures
    return [
        each.model_copy(update={
            "evaluated": figures.get(each.version), "is_kept": each.weights in kept,
            "evaluated_by": best.measure if best and each.version in figures else None,
            "is_best": best is not None and each.version == best.version,
        })
        for each in versions
    ]  # fmt: skip


def stored_routes(history: RunHistory) -> APIRouter:
    """Return the routes; they are described where the scheduler has them."""
    router = APIRouter(include_in_schema=False)
    _add_run(router, history)
    _add_batches(router, history)
    router.include_router(letter_lists(history.letters))
    return router


def _add_run(router: APIRouter, history: RunHistory) -> None:
    @router.get("/v1/run")
    async def run() -> RunView:
        view = await run_view(history)
        has_begun = None if history.recipe is None else view
        return existing(has_begun, f"the store holds no run {history.run!r}")

    @router.get("/v1/load")
    async def load() -> LoadView:
        await history.look()
        return load_at_end(history.recipe, history.recent_usage)

    @router.get("/v1/workers")
    async def workers() -> list[WorkerView]:
        return []

    @router.get("/v1/tag")
    async def tag() -> TagView:
        await history.look()
        return tag_at_end(history.recipe, history.recent_usage)


def _add_batches(router: APIRouter, history: RunHistory) -> None:
    store, name = history.store, history.run

    @router.get("/v1/batches")
    async def batches(limit: Limit = 50, before: Before = None) -> list[api_batches.BatchView]:
        await history.look()
        trained = history.steps[1:][:before]  # batch k made version k + 1
        return [committed_views.committed_batch(each) for each in trained[-limit:][::-1]]

    @router.get("/v1/batches/{batch}")
    async def batch(batch: BatchNumber) -> api_batches.BatchDetail:
        detail = await committed_views.committed_detail(store, name, batch)
        return existing(detail, f"batch {batch} was not committed")

    @router.get("/v1/batches/{batch}/usage")
    async def usage(batch: BatchNumber) -> BatchUsage:
        usage_view = await committed_views.stored_usage(store, name, batch)
        return existing(usage_view, f"what devices did in batch {batch} is not known")

    @router.get("/v1/batches/{batch}/timeline")
    async def timeline(batch: BatchNumber) -> Timeline:
        timeline_view = await committed_views.stored_timeline(store, name, batch)
        return existing(timeline_view, f"what devices did in batch {batch} is not known")
