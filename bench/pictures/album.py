"""Photographs pages in Chromium, and joins the pictures of each page for the docs."""

import asyncio
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.pictures.shots import Shot
from digenrl.local.running.fleet import FolderOfRuns
from digenrl.local.running.home import create_home
from shared.process.http_access import Access

if TYPE_CHECKING:
    from tests.view.browser import Tab

VIEWS = ("laptop", "phone")
MODES = ("light", "dark")
MAX_WAIT_MS = 600_000
"""Time for samples of a prompt, which a process of low priority makes."""
MAX_HEIGHT = 3200
"""Height of a picture, in pixels; the rest of a longer page is left out."""
QUALITY = 80
DOCS_QUALITY = 68
MAX_IN_FULL, SHEET_HEIGHT = 1300, 1200
"""Height of a picture in the documents, and of a sheet before it is reduced, in pixels."""
GAP, GREY = 16, (128, 128, 128)
IN_FULL = {
    "runs-with-one-running", "finished-overview", "finished-samples", "finished-lightbox",
    "finished-try", "finished-curves", "finished-versions", "compare-two-runs", "running-workers",
    "running-timeline", "failed-logs", "failed-letters", "finished-sample", "video-samples",
}  # fmt: skip
"""Shots that the documents show as they are on a wide light screen."""
SETTLED_MS = 300
"""Time in which a canvas is painted after its figures are there."""
IS_DRAWN = """[...document.images].every(each => each.complete || !each.checkVisibility()
    || each.getBoundingClientRect().top > innerHeight)
    && [...document.querySelectorAll('.chart')].every(each => each.hidden
    || each.querySelector('canvas'))"""


async def take(runs: Path, out: Path, shots: Sequence[Shot]) -> list[str]:
    """Photograph pages at both widths, light and dark; return what the browser complains about."""
    from tests.view.browser import browsing
    from tests.view.sight import serving

    fleet, access = FolderOfRuns(runs), Access(is_open=True)
    keeper = asyncio.ensure_future(fleet.keep_up())
    complaints = list[str]()
    try:
        async with serving(create_home(fleet, access, may_start=True), access) as url:
            await _wait_for_cards(fleet)
            for view in VIEWS:
                for mode in MODES:
                    async with browsing(url, view=view, dark=mode == "dark") as tab:
                        for shot in shots:
                            await _photograph(tab, shot, out / f"{shot.name}.{view}-{mode}.webp")
                        complaints += tab.complaints
    finally:
        keeper.cancel()
    return complaints


async def _wait_for_cards(fleet: FolderOfRuns) -> None:
    """Wait until the runs are summed up, which happens in the background."""
    while any(each.moment != each.summary.made_at for each in await fleet.cards()):  # noqa: ASYNC110
        await asyncio.sleep(0.5)


async def _photograph(tab: "Tab", shot: Shot, path: Path) -> None:
    from PIL import Image

    await tab.page.goto(f"{tab.url}{shot.address}")
    for selector in shot.clicks:
        await tab.page.locator(selector).first.click()
    if shot.waits_for:
        await tab.page.locator(shot.waits_for).first.wait_for(timeout=MAX_WAIT_MS)
    window = tab.page.viewport_size
    if shot.is_whole:
        height = await tab.page.evaluate("document.documentElement.scrollHeight")
        whole = {"width": window["width"], "height": min(max(height, window["height"]), MAX_HEIGHT)}
        await tab.page.set_viewport_size(whole)
    await tab.until(IS_DRAWN)
    await tab.page.wait_for_timeout(SETTLED_MS)
    picture = Image.open(io.BytesIO(await tab.page.screenshot()))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.convert("RGB").save(path, quality=QUALITY, method=6)
    await tab.page.set_viewport_size(window)


def write_docs(pages: Path, docs: Path) -> None:
    """Write what the documents show: a few pictures as they are, and of each page a sheet with both
    widths, light and dark, at half of their size."""
    from PIL import Image

    names = {path.name.partition(".")[0] for path in pages.glob("*.webp")}
    (docs / "pages").mkdir(parents=True, exist_ok=True)
    for name in sorted(each for each in IN_FULL if (pages / f"{each}.laptop-light.webp").is_file()):
        with Image.open(pages / f"{name}.laptop-light.webp") as picture:
            shown = picture.crop((0, 0, picture.width, min(picture.height, MAX_IN_FULL)))
            shown.save(docs / f"page-{name}.webp", quality=DOCS_QUALITY, method=6)
    for name in sorted(names):
        files = [pages / f"{name}.{view}-{mode}.webp" for view in VIEWS for mode in MODES]
        pictures = [Image.open(each) for each in files if each.is_file()]
        height = min(SHEET_HEIGHT, max(each.height for each in pictures))
        sheet = Image.new("RGB", (sum(each.width + GAP for each in pictures) - GAP, height), GREY)
        left = 0
        for each in pictures:
            sheet.paste(each.crop((0, 0, each.width, min(each.height, height))), (left, 0))
            left += each.width + GAP
        half = sheet.resize((sheet.width // 2, height // 2), Image.Resampling.LANCZOS)
        half.save(docs / "pages" / f"{name}.webp", quality=DOCS_QUALITY, method=6)
