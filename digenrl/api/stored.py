"""Answers for a run that is over what its scheduler answered while it went on, from the store.

The routes and their types are the scheduler's; no worker is there, and nothing can be changed.
"""

import json
from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import Annotated, TypeVar

from fastapi import APIRouter, HTTPException, Path, Query

from digenrl.api.run_history import RunHistory
from digenrl.reading.schedule import summarise_schedule
from services.scheduler.core.state import Phase
from services.scheduler.shell import api_batches, api_letters, committed
from services.scheduler.shell.api_batches import VersionView
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import RunView, TagDecisionView, TagView, WorkerView
from shared.learning.metrics import nothing_trained
from shared.run.dead_letters import RunProgress, Wanted
from shared.run.journal import PhaseChange, read_newest
from shared.run.layout import staleness_key, weights_folder
from shared.run.usage import BatchUsage, per_second
from shared.store import ObjectStore

Limit = Annotated[int, Query(ge=1, le=200)]
Before = Annotated[int | None, Query(ge=0, lt=2**31)]
Number = Annotated[int, Path(ge=0, lt=2**31)]
LetterNumber = Annotated[int, Path(ge=1, lt=2**31)]
LetterState = Annotated[Wanted, Query()]
LOOKED_BACK = 256
"""Newest entries of the journal among which the last change of the phase is looked for."""
T = TypeVar("T")


async def run_view(history: RunHistory) -> RunView | None:
    """Return where a run has ended; None if the store holds no such run."""
    await history.look()
    if history.recipe is None:
        return None
    step, wanted = max(0, history.version), history.recipe.run.steps
    phase, failure = await _end(history, is_whole=step >= wanted)
    metrics = history.steps[-1].metrics if history.steps else {}
    usage = [history.usage[each] for each in sorted(history.usage)]
    letters, progress = await history.letters(), RunProgress(step)
    stale, reason = await _staleness(history.store, history.run)
    return RunView(
        run=history.run,
        phase=phase,
        step=step,
        steps=wanted,
        policy_version=history.version if history.steps else None,
        reward_mean=metrics.get("reward_mean"),
        effective_sample_share=metrics.get("effective_sample_share"),
        seconds_per_step=summarise_schedule([], usage).seconds_per_step,
        eta_seconds=None,
        waiting_for="nothing" if phase == "finished" else "operator",
        num_workers={},
        missing_workers=[],
        num_quarantined=0,
        num_dead_letters=letters.num_open(progress),
        pause_at_failure=False,
        failure=failure,
        alarms=nothing_trained([(each.version, each.metrics) for each in history.steps]),
        max_staleness=history.recipe.schedule.staleness_limit if stale is None else stale,
        max_staleness_reason=reason,
    )


async def _end(history: RunHistory, *, is_whole: bool) -> tuple[Phase, str | None]:
    """Return the phase in which a run has ended, and why it has failed, if it has.

    A goal may end a run before its last step: the journal says so. A run of which the journal
    says that it is running was killed.
    """
    if is_whole:
        return "finished", None
    seen = 0
    async for _, entry in read_newest(history.store, history.run):
        if isinstance(entry, PhaseChange):
            if entry.phase == "finished":
                return "finished", None
            return ("failed", entry.failure) if entry.phase == "failed" else ("stopped", None)
        if (seen := seen + 1) == LOOKED_BACK:
            break
    return "stopped", None


async def _staleness(store: ObjectStore, run: str) -> tuple[int | None, str | None]:
    """Return what "auto" was decided to be, and why, if that is stored."""
    data = await store.read(staleness_key(run))
    if data is None:
        return None, None
    found = json.loads(data)
    return int(found["max_staleness"]), str(found["reason"])


async def load_view(history: RunHistory) -> LoadView:
    """Return what the newest batches took, and what they should have taken; nothing waits any
    more."""
    await history.look()
    newest = [history.usage[each] for each in sorted(history.usage)]
    schedule = summarise_schedule([], newest)
    batch = None if history.recipe is None else history.recipe.batch
    samples = 0 if batch is None else batch.groups * batch.group_size
    forecast, bound = (
        median(known) if (known := [each for each in seconds if each is not None]) else None
        for seconds in (
            [each.forecast_seconds for each in newest], [each.bound_seconds for each in newest]
        )
    )  # fmt: skip
    return LoadView(
        samples_per_second=per_second(samples, schedule.seconds_per_step),
        forecast_samples_per_second=per_second(samples, forecast),
        bound_samples_per_second=per_second(samples, bound),
        queues=[], slowest=None,
    )  # fmt: skip


def tag_view(history: RunHistory) -> TagView:
    """Return what the recipe asked for, and what was decided in the newest batches."""
    fixed = None if history.recipe is None else history.recipe.schedule.fixed_tag
    return TagView(
        mode="auto" if fixed is None else "fixed" if fixed else "off",
        groups=fixed or 0, lent=0, members=0, samples_left=0, costs={},
        decisions=[
            each
            for batch in sorted(history.usage, reverse=True)
            if (each := _decision(history.usage[batch])) is not None
        ],
    )  # fmt: skip


def _decision(usage: BatchUsage) -> TagDecisionView | None:
    tag = usage.tag
    if tag is None:
        return None
    return TagDecisionView(
        batch=usage.batch, groups=tag.groups, reason=tag.reason, predicted_seconds=None,
        predicted_gain=tag.predicted_gain, measured_seconds=usage.seconds,
        measured_gain=tag.measured_gain,
    )  # fmt: skip


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
    _add_letters(router, history)
    return router


def _add_run(router: APIRouter, history: RunHistory) -> None:
    @router.get("/v1/run")
    async def run() -> RunView:
        return _there(await run_view(history), f"the store holds no run {history.run!r}")

    @router.get("/v1/load")
    async def load() -> LoadView:
        return await load_view(history)

    @router.get("/v1/workers")
    async def workers() -> list[WorkerView]:
        return []

    @router.get("/v1/tag")
    async def tag() -> TagView:
        await history.look()
        return tag_view(history)

    @router.get("/v1/versions")
    async def versions(limit: Limit = 50, before: Before = None) -> list[VersionView]:
        await history.look()
        found = [committed.version_view(each) for each in history.steps[:before][-limit:][::-1]]
        return await with_figures(history, found)


def _add_batches(router: APIRouter, history: RunHistory) -> None:
    store, name = history.store, history.run

    @router.get("/v1/batches")
    async def batches(limit: Limit = 50, before: Before = None) -> list[api_batches.BatchView]:
        await history.look()
        trained = history.steps[1:][:before]  # batch k made version k + 1
        return [committed.committed_batch(each) for each in trained[-limit:][::-1]]

    @router.get("/v1/batches/{batch}")
    async def batch(batch: Number) -> api_batches.BatchDetail:
        found = await committed.committed_detail(store, name, batch)
        return _there(found, f"batch {batch} was not committed")

    @router.get("/v1/batches/{batch}/usage")
    async def usage(batch: Number) -> api_batches.UsageView:
        found = await committed.stored_usage(store, name, batch)
        return _there(found, f"what devices did in batch {batch} is not known")

    @router.get("/v1/batches/{batch}/timeline")
    async def timeline(batch: Number) -> api_batches.TimelineView:
        found = await committed.stored_timeline(store, name, batch)
        return _there(found, f"what devices did in batch {batch} is not known")


def _add_letters(router: APIRouter, history: RunHistory) -> None:
    @router.get("/v1/dead-letters")
    async def letters(
        state: LetterState = "open", limit: Limit = 50, before: Before = None
    ) -> Sequence[api_letters.DeadLetterView]:
        return await stored_letters(history, state, before, limit)

    @router.get("/v1/dead-letters/{number}")
    async def letter(number: LetterNumber) -> api_letters.DeadLetterDetail:
        [*found] = await stored_letters(history, "all", number + 1, 1)
        return _there(
            found[0] if found and found[0].number == number else None,
            f"there is no dead letter {number}",
        )


async def stored_letters(
    history: RunHistory, state: Wanted, before: int | None, limit: int
) -> list[api_letters.DeadLetterDetail]:
    """Return letters of a run that is over, newest first, as they are by the newest commit."""
    await history.look()
    progress = RunProgress(max(0, history.version))
    found = (await history.letters()).newest_first(progress, state, before)
    return [api_letters.letter_view(each) for each in islice(found, limit)]


def _there(found: T | None, otherwise: str) -> T:
    """Return what was found; raises HTTPException with 404 if nothing was."""
    if found is None:
        raise HTTPException(404, otherwise)
    return found
