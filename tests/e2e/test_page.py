"""The demo with its page open in a browser, while it goes on."""

from pathlib import Path

import pytest

from digenrl.local.runs import last_address
from tests.e2e.local_run import SMALL, StartRun, recipe_of
from tests.view.browser import browsing

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 500  # more than are taken meanwhile
PIXELS = """(() => {
  const canvas = document.getElementById("timeline"), { width, height } = canvas;
  const pen = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  const data = pen.getImageData(0, 0, width, height).data;
  return new Set(new Uint32Array(data.buffer)).size > 6;
})()"""
"""Whether the timeline shows more than axes and names."""


async def test_the_demo_is_seen_and_steered_while_it_goes_on(
    start_run: StartRun, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, {**SMALL, "evaluation.every": 1, "schedule.tag": "auto"})
    run = start_run("--steps", str(STEPS), recipe=recipe)
    run.wait_for(lambda now: now["step"] >= 1)
    headers = run.tokens.headers("operator")
    async with browsing(last_address(run.folder, "page"), headers) as tab:
        await tab.open("/")
        await tab.until("document.querySelector('[data-chart=progress] .u-legend') !== null")
        await tab.page.get_by_role("button", name="pause").click()
        await tab.page.get_by_role("button", name="resume").wait_for()
        paused = run.wait_for(lambda now: now["phase"] == "paused")
        await tab.page.get_by_role("button", name="resume").click()
        step = "+document.querySelector('progress').value"
        await tab.until(f"{step} > {paused['step']}")
        await tab.open("/timeline")
        await tab.until(PIXELS)
        await tab.open("/schedule")
        await tab.until("document.querySelectorAll('#part tbody tr').length > 2")
        rows = await tab.page.evaluate("document.querySelectorAll('#part tbody tr').length")
        await tab.until(f"document.querySelectorAll('#part tbody tr').length > {rows}")
        await tab.open("/samples")
        await tab.until("[...document.images].some((each) => each.naturalWidth > 0)")
        tab.check()
