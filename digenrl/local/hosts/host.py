"""This machine takes part in a run: its processes, one per GPU, are kept running.

The exit status is for systemd, Kubernetes, Slurm or a person: 0: the run is finished, or
this process was stopped; 2: this host can never take part as it is; anything else: start it again.
"""

import asyncio
import os
import re
import shlex
import signal
import socket
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from pydantic import ValidationError

from digenrl.hub.fetch import fetch
from digenrl.local.checking.doctor import Finding, disk_finding, secrets_findings, try_gpus
from digenrl.local.hosts.first_host import FirstHost, lead
from digenrl.local.limits import FAREWELL_S, HOST_READY_S, HOST_RETRY_S
from digenrl.local.processes.assignment import assign_gpus
from digenrl.local.processes.gpus import visible_cards
from digenrl.local.processes.preload import plan_preload
from digenrl.local.processes.program import Program
from digenrl.local.processes.starter import Starter
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.running.command_lines import worker_programs
from digenrl.local.runs import read_progress
from digenrl.local.secrets.keys import SETTINGS, Keys
from digenrl.planning.entries import POLICY_ROLES, host_processes
from shared.errors import DigenRLError, Unavailable, UserError
from shared.messages.rights import WORKERS, Role
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import Recipe
from shared.run.layout import numbers_in
from shared.run.run_recipe import read_recipe, wait_for_recipe
from shared.store import ObjectStore, open_store

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HostRequest:
    """Holds what the user asked of `digenrl host`."""

    keys: Path
    """Folder with `hosts.env`, and a folder of secrets for each role of this host."""
    roles: Sequence[Role]
    """Empty: all roles with keys in the folder."""
    logs: Path
    until_finished: bool
    first: FirstHost | None = None
    """Services that this host runs for all hosts; None if another host runs them."""


class RunFinished(DigenRLError):
    """Raised on a host that starts after the run's end."""


async def take_part(request: HostRequest) -> None:
    """Work for the run until it is finished or this process is stopped.

    Raises:
        UserError: if this host can never take part.
        ChildFailed: if a process of this host keeps failing.
    """
    work = asyncio.create_task(_work(request))
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(
            signum, lambda: work.cancelling() or work.cancel()
        )
    with suppress(asyncio.CancelledError):
        await work


async def _work(request: HostRequest) -> None:
    async with AsyncExitStack() as stack:
        leading = []
        if request.first is not None:  # the run has the commit of its model from its start
            await asyncio.to_thread(_with_model, request.first.recipe)
            leading.append(await stack.enter_async_context(lead(request.first, request.keys)))
        with suppress(RunFinished):
            await _keep_workers(request, leading)
        if leading and request.until_finished:
            await asyncio.sleep(FAREWELL_S)


async def _keep_workers(request: HostRequest, leading: Sequence[Supervisor]) -> None:
    """Run this host's workers until they have ended.

    Raises:
        UserError: if this host can never take part.
        ChildFailed: if a process of this host keeps failing.
    """
    recipe, programs = await _plan_workers(request)
    starter = await Starter.begin(plan_preload(recipe), {}, request.logs / "starter.log")
    supervisor = Supervisor(request.logs, {}, starter)
    log.info("host_begins", run=recipe.run.name, workers=[each.name for each in programs])
    marking = asyncio.create_task(_mark_ready(programs, request.logs / "ready"))
    try:
        for program in programs:
            await supervisor.start(program, wait=False)
        await supervisor.finished(*leading)
    finally:
        marking.cancel()
        for each in leading:
            each.is_closing = True
        await supervisor.stop(list(supervisor.children))
        if starter is not None:
            await starter.stop()


async def _plan_workers(request: HostRequest) -> tuple[Recipe, list[Program]]:
    """Return the recipe of the run, once it is known, and what this host runs.

    Raises:
        UserError: if this host can never take part.
        RunFinished: if the run needs no host any more.
    """
    read_settings(request.keys)
    try:
        request.logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--logs: {request.logs}: {error.strerror}; name another") from error
    run, roles = os.environ["DIGENRL_RUN"], request.roles or roles_in(request.keys)
    for role in roles:
        _refuse_faults("--keys", secrets_findings(str(request.keys / role)))
        try:
            settings = ServiceSettings(_secrets_dir=request.keys / role, run=run)  # type: ignore[call-arg]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = f"DIGENRL_{first['loc'][0]}".upper()
            raise UserError(f"{name}: {first['msg']}, not {first['input']!r}") from error
        await _check_role(settings, request)
    store = open_store(settings.store)
    recipe = await wait_for_recipe(store, run, place=settings.store_place)
    if request.until_finished and request.first is None and await _has_ended(store, run):
        raise RunFinished
    recipe = await asyncio.to_thread(_with_model, recipe)
    cards = () if recipe.model.device == "cpu" else visible_cards()
    processes = host_processes(recipe, roles, len(cards))
    _check_machine(settings, [card.name for card in cards] if set(roles) & {*POLICY_ROLES} else [])
    assignment = assign_gpus(recipe, cards, processes)
    for line in (*assignment.warnings, *assignment.notes):
        log.warning("gpus", note=line)
    return recipe, worker_programs(
        recipe, processes, Keys(request.keys), assignment.environments,
        host=host_name(), stays=not request.until_finished,
    )  # fmt: skip


async def _has_ended(store: ObjectStore, run: str) -> bool:
    """Return whether a run has all its versions, and its scheduler, which may have started just
    now, stores no recipe with more steps."""
    for pause in (0.0, HOST_RETRY_S):
        await asyncio.sleep(pause)
        recipe, versions = await read_recipe(store, run), await numbers_in(store, run, "commits")
        if recipe is None or max(versions, default=0) < recipe.run.steps:
            return False
    return True


async def _mark_ready(programs: Sequence[Program], mark: Path) -> None:
    """Touch a file while all workers are ready: the probe of a container reads its age."""
    while True:
        states = await asyncio.gather(*(each.ready() for each in programs), return_exceptions=True)
        if all(state is True for state in states):
            await asyncio.to_thread(mark.touch)
        await asyncio.sleep(HOST_READY_S)


def host_name() -> str:
    """Return this host's name as the names of its workers begin; Slurm may run several jobs on one
    host."""
    whole = "-".join([socket.gethostname(), *filter(None, [os.environ.get("SLURM_JOB_ID")])])
    name = "".join(char if char.isalnum() else "-" for char in whole).strip("-")
    return (name or "host")[:40]


def parse_roles(text: str, key: str) -> list[Role]:
    """Raises UserError, which begins with the key, for a word that is no role of a worker, and for
    a text without a word."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in WORKERS]
    if unknown or (text and not words):
        fault = f"{unknown[0]} is unknown" if unknown else "names no role"
        raise UserError(f"{key}: {fault}; use some of {', '.join(WORKERS)}")
    return [role for role in WORKERS if role in words]


def parse_gpus(text: str, key: str) -> list[str]:
    """Return the numbers of GPUs.

    Raises:
        UserError: if the text is neither numbers nor ranges; begins with the key.

    >>> parse_gpus("0-2,5", "--gpus")
    ['0', '1', '2', '5']
    """
    numbers: list[str] = []
    for part in text.split(","):
        matched = re.fullmatch(r"\s*([0-9]{1,3})(?:-([0-9]{1,3}))?\s*", part)
        first, last = (matched[1], matched[2] or matched[1]) if matched else ("1", "0")
        if int(first) > int(last):
            raise UserError(f"{key}: {text!r} is neither numbers nor ranges; write 0-3 or 0,2")
        numbers += [str(number) for number in range(int(first), int(last) + 1)]
    if len({*numbers}) < len(numbers):
        raise UserError(f"{key}: {text} names a GPU twice")
    return numbers


def read_settings(keys: Path) -> None:
    """Put the settings of the run into the environment, where it does not have them.

    Raises:
        UserError: if the folder has no settings.
    """
    if "DIGENRL_RUN" in os.environ and not (keys / SETTINGS).exists():
        return  # the environment and the folders of the roles have all settings
    try:
        words = shlex.split((keys / SETTINGS).read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"--keys: {keys / SETTINGS}: {getattr(error, 'strerror', error)}; `digenrl host "
            "--at IP --keys KEYS` and `digenrl keys init` write it"
        ) from error
    for word in words:
        name, has_value, value = word.partition("=")
        if has_value:
            os.environ.setdefault(name, value)
    if "DIGENRL_RUN" not in os.environ:
        raise UserError(f"--keys: {keys / SETTINGS} does not name the run (DIGENRL_RUN)")


def roles_in(keys: Path) -> list[Role]:
    """Return the roles of workers of which the folder has keys.

    Raises:
        UserError: if the folder has no keys.
    """
    present: list[Role] = [role for role in WORKERS if (keys / role).is_dir()]
    if not present:
        raise UserError(
            f"--keys: {keys} has no folder of a role ({', '.join(WORKERS)}); copy one from the "
            "folder keys of the first host"
        )
    return present


async def _check_role(settings: ServiceSettings, request: HostRequest) -> None:
    """Wait until NATS lets this role in.

    Raises:
        UserError: if it never will.
        RunFinished: if the brokers are gone because the run is finished, which the first host has
            noted in a folder that it shares with this host.
    """
    while True:
        try:
            async with settings.connect_bus() as bus:
                return await bus.check()
        except Unavailable as error:
            is_noted = read_progress(request.keys.parent).state == "finished"  # hosts may share it
            if request.until_finished and is_noted:
                raise RunFinished from error
            log.warning("waiting_for_nats", error=str(error), setting="DIGENRL_NATS_URL")
            await asyncio.sleep(HOST_RETRY_S)


def _with_model(recipe: Recipe) -> Recipe:
    """Return the recipe with its model, which processes of a host fetch once if it is not here."""
    model = recipe.model
    if model.id is None or model.folder.is_dir():
        return recipe
    folder = fetch(model.id, model.revision, lambda line: log.info("fetch", note=line))
    return recipe.model_copy(update={"model": model.model_copy(update={"folder": folder})})


def _check_machine(settings: ServiceSettings, gpus: Sequence[str]) -> None:
    """Raises UserError if the disk is full, or a GPU does not work."""
    if settings.cache is not None:
        _refuse_faults("DIGENRL_HOST_CACHE", [disk_finding(settings.cache.folder, "folder")])
    _refuse_faults("--gpus", try_gpus(gpus))


def _refuse_faults(key: str, findings: Iterable[Finding]) -> None:
    for finding in findings:
        if finding.state == "fault":
            raise UserError(f"{key}: {finding.found}; {finding.remedy}".removesuffix("; "))
