"""What `digenrl up` shows of the evaluator beside it, and how long it waits for it."""

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from digenrl.evaluation.progress import Progress, routes
from digenrl.local.brokers.embedded import Program
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.running.display import Display
from digenrl.local.running.evaluation import LocalEvaluation
from digenrl.planning.entries import EVALUATOR as NAME
from shared.process.service import Health, worker_app

ALARM = "version 4: the training reward rose ..."


class Beside:
    """An evaluator's HTTP side, and what a person sees of it."""

    def __init__(self, folder: Path) -> None:
        self.progress = Progress()
        self.screen = io.StringIO()
        app = worker_app("evaluation", Health())
        app.include_router(routes(self.progress))
        self.supervisor = Supervisor(folder, {})
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app))
        display = Display(Console(file=self.screen, width=200), "url", "logs")
        self.evaluation = LocalEvaluation("run", 8000, self.supervisor, self.client, display)


@pytest.fixture
async def beside(tmp_path: Path) -> AsyncIterator[Beside]:
    made = Beside(tmp_path)
    yield made
    await made.supervisor.stop([NAME])
    await made.client.aclose()


async def run_child(beside: Beside, code: str) -> None:
    """Run this code where the evaluator would run."""

    async def ready() -> bool:
        return True

    program = Program(name=NAME, argv=[sys.executable, "-c", code], ready=ready, optional=True)
    await beside.supervisor.start(program, wait=False)


async def test_an_alarm_is_shown_once(beside: Beside) -> None:
    assert await beside.evaluation.look() is None, "it has not looked yet"
    beside.progress.pending, beside.progress.alarms = [4, 6], [ALARM]
    assert await beside.evaluation.look() == [4, 6]
    assert await beside.evaluation.look() == [4, 6]
    assert beside.screen.getvalue().count(f"reward hacking? {ALARM}") == 1


async def test_a_finished_run_waits_until_every_version_is_evaluated(beside: Beside) -> None:
    await run_child(beside, "import time; time.sleep(60)")
    beside.progress.pending = [6]
    finishing = asyncio.create_task(beside.evaluation.finish())
    _, waiting = await asyncio.wait({finishing}, timeout=1.2)
    assert waiting
    beside.progress.pending = []
    await asyncio.wait_for(finishing, 5)
    assert beside.screen.getvalue().count("evaluating version 6") == 1


async def test_it_does_not_wait_for_an_evaluator_that_is_given_up(beside: Beside) -> None:
    await run_child(beside, "import sys; sys.exit(2)")
    beside.progress.pending = [6]
    await asyncio.wait_for(beside.evaluation.finish(), 20)
