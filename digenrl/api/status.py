"""Route of a run's reading, from the scheduler and the store."""

import time
from collections.abc import Sequence
from itertools import islice

from fastapi import APIRouter, HTTPException

from digenrl.api.live import LiveRun
from digenrl.api.offline_routes import run_view
from digenrl.api.run_history import RunHistory
from digenrl.reading.ended_runs import load_at_end
from digenrl.reading.facts import MAX_LETTERS, RunFacts, evaluation_view
from digenrl.reading.reading import RunReading, read
from services.scheduler.shell.api_letters import DeadLetterView, Wanted
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import RunView, TagView, WorkerView
from shared.process.http_api import errors


async def read_run(history: RunHistory, live: LiveRun) -> RunReading:
    """Return the reading of a run in progress, or of an ended one.

    Raises:
        Unavailable: if the store does not answer.
    """
    await history.look()
    now, load = await live.get_as(RunView, "/v1/run"), await live.get_as(LoadView, "/v1/load")
    tag, letters = await live.get_as(TagView, "/v1/tag"), await newest_letters(live, "all")
    return read(RunFacts(
        run=now or await run_view(history), is_live=now is not None, at=time.time(),
        load=load or load_at_end(history.recipe, history.recent_usage),
        workers=await live.get_as(list[WorkerView], "/v1/workers") or [],
        letters=letters if now is not None else await stored_letters(history, "all", None),
        tag=None if tag is None else tag.mode, recipe=history.recipe,
        steps=history.step_facts, usage=history.recent_usage,
        evaluations=[evaluation_view(each) for each in history.evaluations],
    ))  # fmt: skip


async def newest_letters(
    live: LiveRun, state: Wanted, before: int | None = None
) -> Sequence[DeadLetterView] | None:
    """Return at most `MAX_LETTERS` dead letters below ``before`` of a run in progress, the newest
    first; None without a scheduler."""
    query = f"state={state}&limit={MAX_LETTERS}" + (f"&before={before}" if before else "")
    return await live.get_as(list[DeadLetterView], f"/v1/dead-letters?{query}")


async def stored_letters(
    history: RunHistory, state: Wanted, before: int | None
) -> Sequence[DeadLetterView]:
    """Return the same of a run that is over."""
    letters = await history.letters()
    return [*islice(letters.newest_first(state, before), MAX_LETTERS)]


def status_routes(history: RunHistory, live: LiveRun) -> APIRouter:
    router = APIRouter(tags=["run"])

    @router.get("/v1/status", operation_id="get_status", responses=errors(404))
    async def status() -> RunReading:
        """State, bottleneck, remedy and alarms of the run: the output of `digenrl status
        --json`."""
        reading = await read_run(history, live)
        if history.recipe is None:
            raise HTTPException(404, f"the store holds no run {history.run!r}")
        return reading

    return router
