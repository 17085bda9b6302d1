"""`digenrl report --scheduler`: what it does with what the API answers."""

import asyncio
from pathlib import Path

import pytest
from fastapi import FastAPI
from rich.console import Console

from digenrl.report.make import make_report
from shared.errors import UserError
from shared.process.http_access import Access
from shared.process.http_api import add_problems
from shared.process.service import listen, serve


async def test_a_scheduler_that_refuses_is_not_asked_for_ever(tmp_path: Path) -> None:
    app, done = FastAPI(), asyncio.Event()
    add_problems(app)  # every path of it is a 404

    async def work() -> None:
        await done.wait()

    listener = listen("127.0.0.1", 0)
    access = Access(is_open=True)
    serving = asyncio.create_task(serve(app, work(), listener=listener, access=access))
    try:
        async with asyncio.timeout(10):
            with pytest.raises(UserError, match=r"--scheduler: http.* refuses: Not Found"):
                await make_report(
                    "run", tmp_path, scheduler=listener.url, wall_seconds=0, console=Console()
                )
    finally:
        done.set()
        await serving
