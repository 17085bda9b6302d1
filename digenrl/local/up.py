"""Runs a recipe on this machine: starts everything, watches the run, and makes the report."""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from digenrl.local import limits
from digenrl.local.brokers.embedded import HOST_CACHE, Brokers, plan_brokers
from digenrl.local.checking.preflight import LocalRun
from digenrl.local.processes.assignment import REPORT
from digenrl.local.processes.ports import free_ports
from digenrl.local.processes.preload import plan_preload
from digenrl.local.processes.starter import Starter
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.running.alarms import AlarmRemedies
from digenrl.local.running.command_lines import (
    command,
    follower_program,
    page_program,
    scheduler_program,
    worker_programs,
)
from digenrl.local.running.display import Display, make_console
from digenrl.local.running.evaluation import LocalEvaluation
from digenrl.local.runs import (
    Run,
    RunProgress,
    noted_failure,
    noted_store,
    read_progress,
    write_address,
)
from digenrl.planning.entries import EVALUATOR, Processes
from services.scheduler.shell.api_load import LoadView
from services.scheduler.shell.api_models import RunView, WorkerView
from shared.process.outgoing import SETTING, named_in

EXIT_INTERRUPTED = 130
EXIT_INCOMPLETE = 3
"""Exit code of a report of which a part has failed."""
STDERR = 2
BROKERS = ["nats", "valkey", "objects"]

Outcome = Literal["finished", "stopped", "failed", "interrupted"]


@dataclass(slots=True)
class Api:
    """Calls the API of the scheduler, or of the run's page."""

    url: str
    client: httpx.AsyncClient

    async def ready(self) -> bool:
        return (await self.client.get(f"{self.url}/readyz")).status_code == 200

    async def get(self, path: str) -> Any | None:
        """Return the answer, or None while the scheduler restarts."""
        try:
            return (await self.client.get(f"{self.url}{path}")).raise_for_status().json()
        except httpx.HTTPError:
            return None

    async def resume(self) -> None:
        await self.client.post(f"{self.url}/v1/run/resume")

    async def link(self) -> str | None:
        """Return a link that signs a browser in, once; None while the scheduler restarts."""
        try:
            answer = (await self.client.post(f"{self.url}/v1/codes")).raise_for_status()
        except httpx.HTTPError:
            return None
        return f"{self.url}{answer.json()['path']}"


async def run_locally(local: LocalRun, *, as_json: bool = False) -> int:
    """Run until the run finishes, stops or is interrupted. Returns the exit code of the command.

    With ``as_json``, stdout gets the API's view of the run, and nothing else.
    """
    console = make_console(stderr=as_json)
    client, api, page = _apis(local)
    weighted = local.recipe.largest_weight is not None
    display = Display(console, api.url, str(local.folder / "logs"), weighted, as_json)
    brokers = plan_brokers(local.folder, local.keys, runs=[local.recipe.run.name])
    local.keys.write(brokers.secrets)
    environment = _environment(local, brokers)
    logs = local.folder / "logs"
    starter = await Starter.begin(plan_preload(local.recipe), environment, logs / "starter.log")
    supervisor = Supervisor(logs, environment, starter)
    evaluation = _evaluation(local, supervisor, display, client)
    interrupted = _on_interrupt()
    began = time.monotonic()
    try:
        with noted_store(local.folder, brokers.environment | brokers.secrets["client"]):
            with display.shown(), noted_failure(local.folder):
                run = _start_and_watch(local, brokers, supervisor, display, api, page, evaluation)
                outcome = await _until(run, supervisor, interrupted)
                wall_seconds = time.monotonic() - began
                outcome = await _drain(outcome, supervisor, display, evaluation, interrupted)
            if outcome == "finished":
                code = await _report(local, supervisor, wall_seconds, interrupted, as_json=as_json)
                if code != EXIT_INTERRUPTED:
                    replace(read_progress(local.folder), state="finished").write(local.folder)
                    return _explain_report(code, local, console)
                outcome = "interrupted"
        return _explain(outcome, local, console)
    finally:
        await _stop_services(supervisor)
        await supervisor.stop(BROKERS, seconds=limits.BROKER_STOP_S)
        await client.aclose()
        if starter is not None:
            await starter.stop()
        shutil.rmtree(local.folder / HOST_CACHE, ignore_errors=True)


def _apis(local: LocalRun) -> tuple[httpx.AsyncClient, Api, Api]:
    """Return a client with the APIs of scheduler and page, whose addresses are written down."""
    client = httpx.AsyncClient(  # on loopback: there is no certificate to check
        timeout=limits.API_TIMEOUT_S,
        verify=False,
        trust_env=False,
        headers=local.tokens.headers("operator"),
    )
    api = Api(f"http://127.0.0.1:{local.api_port}", client)
    page = Api(f"http://127.0.0.1:{free_ports(1)[0]}", client)
    write_address(local.folder, api.url)
    write_address(local.folder, page.url, "page")
    return client, api, page


def _environment(local: LocalRun, brokers: Brokers) -> dict[str, str]:
    """Return the variables of the run's processes."""
    for name in brokers.secrets["client"]:  # a variable would take precedence over the run's file
        os.environ.pop(name, None)
    secrets = local.keys.environment("client") | local.tokens.environment
    return brokers.environment | secrets | _no_cache(local) | _asked(local)


async def _drain(
    outcome: Outcome, supervisor: Supervisor, display: Display,
    evaluation: LocalEvaluation | None, interrupted: asyncio.Event,
) -> Outcome:  # fmt: skip
    """Stop the services, and let a finished run's evaluation end."""
    display.say("draining the services")
    await _stop_services(supervisor, but=[EVALUATOR])
    if outcome == "finished" and evaluation is not None:
        outcome = await _until(_finish(evaluation), supervisor, interrupted)
    await _stop_services(supervisor)
    return outcome


def _asked(local: LocalRun) -> dict[str, str]:
    """Allow the hosts that the recipe has asked: who runs it here has chosen it."""
    tables = (*local.recipe.reward.scorers, *local.recipe.evaluation.scorers)
    allowed = named_in(table.url for table in tables)
    return {SETTING: allowed} if allowed else {}


def _no_cache(local: LocalRun) -> dict[str, str]:
    """Turn off, unless configured, the cache that a single rollout worker would not share."""
    is_alone = local.recipe.rollout.workers < 2
    return {"DIGENRL_HOST_CACHE": os.environ.get("DIGENRL_HOST_CACHE", "off")} if is_alone else {}


async def _stop_services(supervisor: Supervisor, but: Sequence[str] = ()) -> None:
    kept = [*BROKERS, *but]
    await supervisor.stop([name for name in supervisor.children if name not in kept])


async def _until(
    work: Coroutine[Any, Any, Outcome], supervisor: Supervisor, interrupted: asyncio.Event
) -> Outcome:
    """Return the outcome of ``work``, or "interrupted".

    Raises:
        ChildFailed: if a required child keeps failing.
    """
    running = asyncio.create_task(work)
    stopped = asyncio.create_task(interrupted.wait())
    try:
        awaited: set[asyncio.Future[Any]] = {running, stopped, supervisor.failed}
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        if supervisor.failed.done():
            supervisor.failed.result()
        return "interrupted" if stopped.done() else await running
    finally:
        for task in (running, stopped):
            task.cancel()
        await asyncio.gather(running, stopped, return_exceptions=True)


async def _finish(evaluation: LocalEvaluation) -> Outcome:
    await evaluation.start()  # it may have waited for a GPU
    await evaluation.finish()
    return "finished"


async def _start_and_watch(
    local: LocalRun,
    brokers: Brokers,
    supervisor: Supervisor,
    display: Display,
    api: Api,
    page: Api,
    evaluation: LocalEvaluation | None,
) -> Outcome:
    for warning in local.gpus.warnings:
        display.warn(warning)
    for note in local.gpus.notes:
        display.say(note)
    display.say(f"run {local.recipe.run.name}: starting NATS, Valkey and the object store")
    await asyncio.gather(*(supervisor.start(program) for program in brokers.programs))
    display.say("starting the services")
    await supervisor.start(
        page_program(local, urlsplit(page.url).port or 0, page.ready), wait=False
    )
    processes = Processes.of_run(local.recipe)
    for program in worker_programs(local.recipe, processes, local.keys, local.gpus.environments):
        await supervisor.start(program, wait=False)
    await asyncio.gather(
        supervisor.start(scheduler_program(local, api.ready)), _show_link(page, display)
    )
    if not display.shows:  # the table has it
        tokens = local.tokens.folder
        display.tell(f"the scheduler's API, for programs with a token of {tokens}: {api.url}")
    if local.targets:
        await supervisor.start(follower_program(local, api.ready), wait=False)
    # From here on, the store has the recipe of this start.
    if evaluation is not None and not local.gpus.evaluates_at_end:
        await evaluation.start()
    return await _watch(local, supervisor, display, api, evaluation)


async def _show_link(page: Api, display: Display) -> None:
    """Print the link to the run's page as soon as it answers; without one if it does not."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limits.PAGE_TIMEOUT_S):
            while (link := await page.link()) is None:  # noqa: ASYNC110 -- another process
                await asyncio.sleep(limits.LINK_POLL_S)
            display.tell(f"link to the run's page (works once, for ten minutes): {link}")


def _record_work(supervisor: Supervisor, workers: list[dict[str, Any]]) -> None:
    """Report to the supervisor a trainer's new version, or any work of another worker."""
    for worker in workers:
        if worker["service"] == "trainer" and worker["policy_version"] is not None:
            supervisor.record_work(worker["worker"], f"version {worker['policy_version']}")
        elif worker["service"] != "trainer" and worker["num_done"]:
            supervisor.record_work(worker["worker"], worker["address"])


async def _tell_failure(failure: str | None, display: Display, api: Api) -> None:
    """Print a failure, if there is one, with the reason of the newest open dead letter."""
    if failure is not None:
        newest = await api.get("/v1/dead-letters?limit=1") or []
        display.tell("; newest dead letter: ".join([failure, *(each["reason"] for each in newest)]))


async def _watch(
    local: LocalRun,
    supervisor: Supervisor,
    display: Display,
    api: Api,
    evaluation: LocalEvaluation | None,
) -> Outcome:
    resume, is_flawless = local.resumed, not local.resumed
    mender = AlarmRemedies(local.folder, api.url, api.client)
    while True:
        run, workers = await api.get("/v1/run"), await api.get("/v1/workers")
        if run is not None and workers is not None:
            RunProgress.from_view(run).write(local.folder)
            load = await api.get("/v1/load") if display.shows else None
            phase = run["phase"]
            _record_work(supervisor, workers)
            if resume and phase in ("paused", "stopped", "failed"):
                # An operator or a failure has stopped the run before this start.
                await api.resume()
                resume = False
            else:
                resume = resume and phase != "running"
                display.update(
                    RunView.model_validate(run),
                    [WorkerView.model_validate(each) for each in workers],
                    None if load is None else LoadView.model_validate(load),
                )
                if is_flawless and run["num_dead_letters"]:
                    is_flawless = False
                    await _tell_failure("a first attempt has failed", display, api)
                if phase in ("finished", "stopped", "failed"):
                    await _tell_failure(run["failure"], display, api)
                    return phase  # type: ignore[no-any-return]
        if evaluation is not None:
            await evaluation.look()
        await mender.look(supervisor)
        await asyncio.sleep(limits.WATCH_POLL_S)


def _evaluation(
    local: LocalRun, supervisor: Supervisor, display: Display, client: httpx.AsyncClient
) -> LocalEvaluation | None:
    if local.recipe.evaluation.every is None:
        return None
    [port] = free_ports(1)
    return LocalEvaluation(
        local.recipe.run.name, port, supervisor, client, display,
        environment=local.gpus.environments[EVALUATOR],
    )  # fmt: skip


async def _report(
    local: LocalRun,
    supervisor: Supervisor,
    wall_seconds: float,
    interrupted: asyncio.Event,
    *,
    as_json: bool,
) -> int:
    argv = command(
        "report", "--run", local.recipe.run.name, "--out", str(local.folder),
        "--wall-seconds", str(wall_seconds),
    )  # fmt: skip
    environment = local.gpus.environments[REPORT]
    return await run_to_end(
        supervisor, argv, environment, interrupted, output=STDERR if as_json else None
    )


async def run_to_end(
    supervisor: Supervisor,
    argv: Sequence[str],
    environment: Mapping[str, str],
    interrupted: asyncio.Event,
    *,
    output: int | None = None,
) -> int:
    """Run a program and return its exit code; if it is interrupted, terminate it.

    ``output``: file that it writes to; by default, what this process writes to.
    """
    process = await supervisor.launch(argv, environment, output)
    ending = asyncio.create_task(process.wait())
    stop_request = asyncio.create_task(interrupted.wait())
    await asyncio.wait({ending, stop_request}, return_when=asyncio.FIRST_COMPLETED)
    stop_request.cancel()
    if ending.done():
        return ending.result()
    process.send_signal(signal.SIGTERM)
    await ending
    return EXIT_INTERRUPTED


def _explain_report(code: int, local: LocalRun, console: Console) -> int:
    if code not in (0, EXIT_INCOMPLETE):  # what this one says, the report says of its parts
        again = Run(local.folder.name, "", local.folder, is_local=True).command("report")
        why = f"the run is whole; its report has ended with status {code}; repeat it: {again}"
        console.print(why, highlight=False, soft_wrap=True)
    return EXIT_INCOMPLETE if code else 0


def _explain(outcome: Outcome, local: LocalRun, console: Console) -> int:
    again = f"continue with: {local.again}"
    if outcome == "interrupted":
        console.print(f"interrupted; nothing is lost, {again}", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    if outcome == "stopped":
        console.print(f"stopped on request; {again}", highlight=False, soft_wrap=True)
        return 0
    logs = local.folder / "logs"
    why = f"`digenrl dlq list {local.recipe.run.name}` and the logs in {logs} say why"
    again = f"once that is repaired: {local.again.removesuffix(' --resume')}"
    console.print(f"the run has failed; {why}; {again}", highlight=False, soft_wrap=True)
    return 1


def _on_interrupt() -> asyncio.Event:
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, event.set)
    return event
