"""Ten tasks of people who train, done by keyboard alone in a headless Chromium."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.local.running.fleet import FolderOfRuns
from digenrl.local.running.home import create_home
from digenrl.local.running.run_cards import Summary
from digenrl.local.runs import RunProgress
from digenrl.reading.blind import blind_order
from digenrl.view.pages import View
from shared.process.http_access import Access
from shared.recipe.recipe import load_recipe
from shared.run.layout import usage_key
from shared.run.usage import BatchUsage
from tests.api.past_run import past_run
from tests.follow.runs import RUN, Run
from tests.view.browser import Tab, browsing
from tests.view.sight import local_run, serving
from tests.view.stored import evaluate

pytestmark = pytest.mark.slow

MAX_TABS = 150
FOCUS = """() => {
  const each = document.activeElement, [box] = each.getClientRects();
  const style = getComputedStyle(each), target = each.closest("label") ?? each;
  const above = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  return {
    outlined: style.outlineStyle !== "none" || style.opacity === "0",
    seen: target.contains(above),
  };
}"""


class TwentyRuns(FolderOfRuns):
    """A folder of twenty runs with the objects of one; the last one has learned most."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "runs")
        self.objects = _stored(folder).store
        self.views: dict[str, View] = {}
        for number in range(20):
            run = local_run(self.folder / f"run-{number}")
            summary = Summary(
                made_at="stopped 4", first=number, last=9.0, gain=number / 10, gain_of="reward"
            )
            (run / "card").mkdir()
            (run / "card" / "summary.json").write_text(summary.model_dump_json())
        faster = load_recipe(self.folder / "run-3" / "recipe.json", {"trainer.learning_rate": 0.25})
        (self.folder / "run-3" / "recipe.json").write_text(faster.model_dump_json())
        lost = self.folder / "run-7"
        RunProgress("failed", 4, 30, failure="reward-0: the scorer returned NaN").write(lost)
        (lost / "logs").mkdir()
        line = {"ts": "2026-01-01T00:00:01Z", "level": "error", "event": "scoring_failed"}
        (lost / "logs" / "reward-0.log").write_text(f"{json.dumps(line)}\n")

    async def open(self, name: str) -> View | None:
        if name not in self.views:
            history = RunHistory(self.objects, RUN)
            history.recipe = load_recipe(self.folder / name / "recipe.json")
            live = LiveRun("", httpx.AsyncClient())
            self.views[name] = View(history, live, folder=self.folder / name)
        return self.views[name]


def _stored(folder: Path) -> Run:
    run = past_run(folder / "objects")
    asyncio.run(_fill(run))
    return run


async def _fill(run: Run) -> None:
    for version in (0, 1):
        await evaluate(run, version)
    uses = {"rollout-0": {"generating": 1.0, "waiting_for_trainer": 3.0}}
    usage = {"batch": 0, "seconds": 4.0, "devices": uses, "device_hours": 2.5}
    data = BatchUsage.model_validate(usage).model_dump_json().encode()
    await run.store.create(usage_key(RUN, 0), data)


@dataclass
class Keyboard:
    """Goes through a page by the keys that people have."""

    tab: Tab

    async def reach(self, selector: str) -> None:
        """Press Tab until an element has the focus, and check that its focus is seen."""
        for _ in range(MAX_TABS):
            await self.press("Tab")
            if await self.tab.page.evaluate(f"document.activeElement.matches(`{selector}`)"):
                break
        else:
            pytest.fail(f"{selector} is not reached by {MAX_TABS} times Tab")
        focus = await self.tab.page.evaluate(FOCUS)
        assert focus["outlined"] and focus["seen"], (selector, focus)

    async def enter(self, selector: str) -> None:
        """Reach a button, or a picture that opens, and use it."""
        await self.reach(selector)
        await self.press("Enter")

    async def follow(self, selector: str) -> None:
        """Reach a link, and open its page."""
        await self.reach(selector)
        async with self.tab.page.expect_navigation():
            await self.press("Enter")

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.tab.page.keyboard.press(key)

    async def type(self, text: str) -> None:
        await self.tab.page.keyboard.type(text)

    async def sees(self, text: str) -> None:
        await self.tab.page.get_by_text(text).first.wait_for()

    async def is_at(self, path: str) -> None:
        await self.tab.until(
            f"location.pathname === '{path}' && document.readyState === 'complete'"
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> TwentyRuns:
    return TwentyRuns(tmp_path_factory.mktemp("runs"))


@pytest.fixture(params=["laptop", "phone"])
async def keyboard(request: pytest.FixtureRequest, runs: TwentyRuns) -> AsyncIterator[Keyboard]:
    """A browser at the page of twenty runs."""
    app = create_home(runs, access := Access(is_open=True))
    async with serving(app, access) as url, browsing(url, view=request.param) as tab:
        await tab.open("/")
        yield Keyboard(tab)
        assert tab.elsewhere == []


async def test_the_run_that_learned_most_of_twenty_is_found(keyboard: Keyboard) -> None:
    await keyboard.reach("#sort")
    await keyboard.type("le")
    await keyboard.tab.until("document.querySelector('.card').id === 'run-run-19'")


async def test_the_worst_picture_of_a_step_and_the_reason_are_found(keyboard: Keyboard) -> None:
    await keyboard.follow(".card .name")
    await keyboard.follow("a[href*='order=worst']")
    await keyboard.reach("input[name=step]")
    await keyboard.press("ControlOrMeta+a")
    await keyboard.type("1")
    async with keyboard.tab.page.expect_navigation():
        await keyboard.press("Enter")
    await keyboard.sees("which step 1 trained on")
    await keyboard.follow(".gallery a")
    await keyboard.sees("the step makes such samples less likely")
    await keyboard.sees("1 of 4 in its group")


async def test_two_versions_are_judged_blind(keyboard: Keyboard) -> None:
    await keyboard.follow(".card .name")
    await keyboard.follow("a[href*='compare/blind']")
    await keyboard.is_at("/compare/blind")
    place = "document.querySelector('.votes').getBoundingClientRect().top"
    top = await keyboard.tab.page.evaluate(place)
    long = "document.querySelector('.prompt').textContent = 'a long prompt '.repeat(99)"
    await keyboard.tab.page.evaluate(long)
    assert await keyboard.tab.page.evaluate(place) == top, "the buttons stay where they are"
    seed = int(parse_qs(urlsplit(keyboard.tab.page.url).query)["seed"][0])
    for number, pair in enumerate(blind_order(6, seed)[:4], 1):
        await keyboard.press("ArrowLeft" if pair.is_swapped else "ArrowRight")
        await keyboard.sees(f"in {number} of {number} pairs")
    await keyboard.sees("version 1 is better.")


async def test_two_recipes_are_compared(keyboard: Keyboard) -> None:
    await keyboard.follow("a[href='/compare']")
    for run in ("run-2", "run-3"):
        await keyboard.is_at("/compare")
        await keyboard.reach("#add")
        await keyboard.type(run)
        async with keyboard.tab.page.expect_navigation():
            await keyboard.press("Enter")
        await keyboard.tab.until(f"document.querySelector('[data-run={run}]') !== null")
    await keyboard.sees("trainer.learning_rate")


async def test_the_cause_of_a_slow_run_is_found(keyboard: Keyboard) -> None:
    await keyboard.follow(".card .name")
    await keyboard.sees("they wait for")
    await keyboard.follow(".sentence a[href$='/schedule']")
    await keyboard.sees("share of its time")


async def test_a_recipe_is_copied_with_another_learning_rate(
    keyboard: Keyboard, runs: TwentyRuns
) -> None:
    await keyboard.enter("[aria-label='copy the recipe of run-3']")
    await keyboard.reach("input[name='trainer.learning_rate']")
    await keyboard.type("0.5")
    await keyboard.enter("#copy-dialog .primary")
    await keyboard.sees("digenrl up")
    await keyboard.press("Escape")
    await keyboard.tab.until("!document.getElementById('copy-dialog').open")
    copied = runs.folder / "run-3-2.json"
    assert load_recipe(copied).trainer.learning_rate == 0.5
    copied.unlink()


async def test_the_log_line_of_a_failure_is_found(keyboard: Keyboard) -> None:
    await keyboard.sees("the scorer returned NaN")
    await keyboard.follow(".failure a")
    await keyboard.sees("reward-0 error: scoring_failed")


async def test_the_hours_of_devices_are_found(keyboard: Keyboard) -> None:
    await keyboard.follow(".card .name")
    await keyboard.follow(".groups a[href$='/workers']")
    await keyboard.sees("machine-hours so far")


async def test_a_prompt_of_one_s_own_is_sampled(keyboard: Keyboard) -> None:
    await keyboard.follow(".card .name")
    await keyboard.follow(".groups a[href$='/samples']")
    await keyboard.follow(".tabs a[href$='/try']")
    await keyboard.reach("textarea[name=prompt]")
    await keyboard.type("a red bicycle")
    async with keyboard.tab.page.expect_request("**/v1/samples") as request:
        await keyboard.enter("#sample")
    body = (await request.value).post_data_json
    assert (body["prompt"], body["versions"]) == ("a red bicycle", [0, 1])


async def test_a_lora_is_exported(keyboard: Keyboard) -> None:
    await keyboard.follow(".card .name")
    await keyboard.follow(".status a[href$='/versions']")
    await keyboard.sees("digenrl export")


async def test_a_picture_is_opened_and_closed(keyboard: Keyboard) -> None:
    await keyboard.follow(".card .name")
    await keyboard.follow(".groups a[href$='/samples']")
    await keyboard.enter(".tiles a")
    await keyboard.tab.until("document.getElementById('lightbox').open")
    await keyboard.press("ArrowRight")
    await keyboard.sees("2 of 6")
    await keyboard.press("Escape")
    await keyboard.tab.until("!document.getElementById('lightbox').open")
    await keyboard.tab.until("document.activeElement.matches('.tiles a')")
