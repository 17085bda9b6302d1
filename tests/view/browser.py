"""A headless Chromium in which tests look at pages, and what it says of them."""

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
AXE = Path(__file__).parent / "axe" / "axe.min.js"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
SERIOUS = ("serious", "critical")
WIDTHS = {"laptop": (1440, 900), "phone": (390, 844)}
PATIENCE_MS = 60_000


def chromium() -> str:
    """Return the browser's path. Without one, CI fails; elsewhere the test is skipped."""
    found = os.environ.get("DIGENRL_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        reason = "no Chromium is installed: apt-get install chromium, or set DIGENRL_CHROMIUM"
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    return found


@cache
def axe() -> str:
    """Return axe-core's source, which is what npm has."""
    data = AXE.read_bytes()
    assert hashlib.sha256(data).hexdigest() == AXE_SHA256
    return data.decode()


@dataclass
class Tab:
    """A page in the browser, and all that it has complained about or asked other hosts for."""

    page: Any
    url: str
    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", self._note_request)
        self.page.on("dialog", lambda dialog: asyncio.ensure_future(dialog.accept()))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _note_request(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc != urlsplit(self.url).netloc:
            self.elsewhere.append(request.url)

    async def open(self, path: str) -> None:
        answer = await self.page.goto(f"{self.url}{path}")
        assert answer is not None and answer.ok, f"{path}: {answer and answer.status}"

    async def until(self, condition: str) -> None:
        """Wait until a condition in JavaScript holds; the page's policy forbids the browser's own
        way to wait for one."""
        async with asyncio.timeout(PATIENCE_MS / 1000):
            while not await self.page.evaluate(condition):  # noqa: ASYNC110 -- another process
                await asyncio.sleep(0.05)

    async def faults(self) -> list[str]:
        """Return what axe-core finds serious, a line for each element."""
        found = await self.page.evaluate("axe.run({ resultTypes: ['violations'] })")
        return [
            f"{fault['id']}: {node['html']} ({node['failureSummary']})"
            for fault in found["violations"]
            if fault["impact"] in SERIOUS
            for node in fault["nodes"]
        ]

    def check(self) -> None:
        assert self.complaints == [] and self.elsewhere == []


@contextlib.asynccontextmanager
async def browsing(
    url: str, headers: dict[str, str] | None = None, *, view: str = "laptop", dark: bool = False
) -> AsyncIterator[Tab]:
    """Open a browser with one page; ``headers`` are sent with every request."""
    path = chromium()
    from playwright.async_api import async_playwright  # what has no browser need not have it

    width, height = WIDTHS[view]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path, args=[*OPTIONS],
            ignore_default_args=["--disable-back-forward-cache"],  # people's browsers have it
        )  # fmt: skip
        try:
            context = await browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme="dark" if dark else "light",
                extra_http_headers=headers or {},
            )
            await context.add_init_script(axe())
            yield Tab(await context.new_page(), url)
        finally:
            await browser.close()
