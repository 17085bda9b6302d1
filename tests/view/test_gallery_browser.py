"""The gallery in a headless Chromium: by keyboard alone, and with 500 tiles."""

import asyncio
import io
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest

from digenrl.evaluation.media import as_mp4, as_png
from digenrl.evaluation.records import EvaluationRecord, Evaluations, KeptSample, Quality
from digenrl.local.secrets.tokens import load_tokens
from tests import examples
from tests.follow.runs import RUN, Run
from tests.view.browser import browsing
from tests.view.sight import page_of
from tests.view.stored import stored_run

pytestmark = pytest.mark.slow

QUERY = "new URL(location.href).searchParams"


async def test_the_gallery_is_used_by_keyboard_and_its_address_shows_the_same(
    tmp_path: Path,
) -> None:
    run = await asyncio.to_thread(stored_run, tmp_path, False)
    tokens = load_tokens(tmp_path)
    async with page_of(run, tokens) as url, browsing(url, tokens.headers("viewer")) as tab:
        keys = tab.page.keyboard
        await tab.open("/samples?sort=worst")
        await tab.page.locator(".tiles a").first.focus()
        for key in ("ArrowRight", "x", "Enter", "ArrowRight", "b", "+"):
            await keys.press(key)
        await tab.until(f"{QUERY}.get('show') === '2' && {QUERY}.get('view') === 'beside'")
        assert await tab.faults() == []
        await tab.page.reload()
        await tab.until("document.getElementById('lightbox').open")
        assert await tab.page.get_by_text("3 of 6", exact=True).is_visible()
        await keys.press("Escape")
        await tab.until(f"{QUERY}.get('show') === null && {QUERY}.get('pick') === '1'")
        async with tab.page.expect_download() as download:
            await tab.page.get_by_role("button", name="Download").click()
        path = await (await download.value).path()
        with ZipFile(io.BytesIO(path.read_bytes())) as archive:
            assert archive.testzip() is None
            assert archive.namelist() == ["0001.png", "samples.csv"]
            assert b'"0001.png","4","the digit 1","0.1","0.4"' in archive.read("samples.csv")
        assert await tab.faults() == []
        tab.check()


MOMENT = "document.querySelector('#lightbox video.after').currentTime"


async def test_a_video_goes_forward_and_back_by_single_frames(tmp_path: Path) -> None:
    frames = np.zeros((24, 3, 64, 64), np.uint8)
    frames[np.arange(24), :, np.arange(24)] = 255
    run = await asyncio.to_thread(stored_run, tmp_path, False, video=as_mp4(frames))
    tokens = load_tokens(tmp_path)
    async with page_of(run, tokens) as url, browsing(url, tokens.headers("viewer")) as tab:
        keys = tab.page.keyboard
        await tab.open("/samples?show=0")
        await tab.until(f"{MOMENT} > 0.2")
        await keys.press(" ")
        await tab.page.evaluate(f"{MOMENT} = 0.5")
        await tab.until(f"{MOMENT} === 0.5")
        await keys.press(",")
        await tab.until(f"Math.abs({MOMENT} - 7 / 16) < 0.001")
        for _ in range(3):
            await keys.press(".")
        await tab.until(f"Math.abs({MOMENT} - 10 / 16) < 0.001")
        tab.check()


def begun(folder: Path) -> Run:
    run = Run(folder).begin()
    run.commit(4)
    return run


MEASURE_FRAMES = """async () => {
  const times = [];
  let before = await new Promise(requestAnimationFrame);
  for (let frame = 0; frame < 200; frame++) {
    scrollBy(0, frame < 100 ? 300 : -300);
    const now = await new Promise(requestAnimationFrame);
    times.push(now - before);
    before = now;
  }
  return times;
}"""


@pytest.mark.clock
async def test_500_tiles_scroll_smoothly(tmp_path: Path) -> None:
    run = await asyncio.to_thread(begun, tmp_path / "objects")
    folder = Evaluations(run.store, RUN, "a" * 64)
    draws = np.random.default_rng(0)
    for version in (0, 4):
        samples = []
        for number in range(500):
            picture = as_png(draws.integers(0, 256, (3, 96, 96), np.uint8))
            still = await run.store.put(folder.media_folder, picture, suffix=".png")
            scores: dict[str, float | None] = {"reward": draws.random()}
            samples.append(
                KeptSample(prompt=f"prompt {number}", media=still, still=still, scores=scores)
            )
        await folder.add(EvaluationRecord(
            run=RUN, policy=examples.policy(version), settings="a" * 64, worker="w", seconds=1.0,
            quality=Quality(reward=0.5, num_samples=500), samples=tuple(samples),
        ))  # fmt: skip
    tokens = load_tokens(tmp_path)
    async with page_of(run, tokens) as url, browsing(url, tokens.headers("viewer")) as tab:
        await tab.open("/samples?view=slider&size=s")
        await tab.until("!document.querySelector('.tiles img[loading=lazy]')")
        times = sorted(await tab.page.evaluate(MEASURE_FRAMES))
        tab.check()
    p95 = times[int(0.95 * len(times))]
    print(f"frames of 500 tiles: p95 {p95:.1f} ms, longest {times[-1]:.1f} ms")  # noqa: T201
    assert p95 <= 50
