"""The page of all runs, and each run below an address of its own."""

import asyncio
import re
import time
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.local.running.fleet import FolderOfRuns
from digenrl.local.running.home import create_home
from digenrl.local.running.run_cards import Summary
from digenrl.local.runs import RunProgress
from digenrl.local.secrets.tokens import Tokens, load_tokens
from digenrl.view.pages import View
from shared.errors import Unavailable
from shared.process.http_access import Access, Role, TokenFile
from shared.process.http_guard import Guard, own_names
from shared.recipe.recipe import load_recipe
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.follow.runs import RUN
from tests.view.sight import Scheduler, local_run
from tests.view.stored import stored_run

BROWSER = {"accept": "text/html"}


class TwoRuns(FolderOfRuns):
    """A folder with an ended run and one in progress, whose objects are in another folder."""

    def __init__(self, folder: Path, scheduler: Scheduler) -> None:
        super().__init__(folder / "runs")
        store = stored_run(folder).store
        over, live = LiveRun("", httpx.AsyncClient()), scheduler.live
        self.views = {
            "old": View(RunHistory(store, RUN), over), "new": View(RunHistory(store, RUN), live)
        }  # fmt: skip
        for name in self.views:
            local_run(self.folder / name)

    async def open(self, name: str) -> View | None:
        return self.views.get(name)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return load_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, scheduler: Scheduler) -> TwoRuns:
    return TwoRuns(tmp_path_factory.mktemp("runs"), scheduler)


def client_of(
    runs: FolderOfRuns, tokens: Tokens, role: Role, own: View | None = None, *,
    may_start: bool = False,
) -> TestClient:  # fmt: skip
    access = Access(TokenFile(tokens.folder / "api_tokens.json"))
    guard = Guard(
        create_home(runs, access, own, may_start=may_start), own_names("127.0.0.1"), access=access
    )
    return TestClient(guard, base_url="http://localhost", headers=tokens.headers(role))


@pytest.mark.parametrize(
    ("address", "body", "line"),
    [
        ("old/notes", {"note": "typed wrongly"}, "422 body.note: is unknown"),
        ("old/notes", {"tags": ["x" * 101]}, "422 body.tags.0: "),
        ("o%20d/notes", {}, "422 path.name: use 1 to 64 letters"),
        ("nope/copies", {"name": "new"}, "404 there is no run nope"),
        ("nope/start", {}, "404 there is no run nope"),
        ("old/copies", {"name": "a b"}, "422 body.name: use 1 to 64 letters"),
        ("old/copies", {"name": "c", "change": {}}, "422 body.change: is unknown"),
    ],
)
def test_a_wrong_request_changes_nothing_and_is_told_the_field(
    runs: TwoRuns, tokens: Tokens, address: str, body: object, line: str
) -> None:
    before = sorted(path.name for path in runs.folder.rglob("*.json"))
    client = client_of(runs, tokens, "operator", may_start=True)
    refused = client.post(f"/v1/runs/{address}", json=body)
    assert f"{refused.status_code} {refused.json()['detail']}".startswith(line)
    assert sorted(path.name for path in runs.folder.rglob("*.json")) == before


def test_all_runs_are_listed_and_each_has_pages_and_an_api(runs: TwoRuns, tokens: Tokens) -> None:
    client = client_of(runs, tokens, "viewer")
    home = client.get("/")
    assert home.url.path == "/runs" and 'href="/runs/old/"' in home.text
    page = client.get("/runs/old/").text
    assert "not running; stopped after step 4" in page
    assert 'href="/runs/old/samples"' in page and 'href="/runs"' in page
    assert client.get("/runs/old/v1/run").json()["step"] == 4
    assert client.get("/runs/new/v1/run").json()["phase"] == "running"
    gallery = client.get("/runs/old/samples").text
    picture = gallery.partition('src="/runs/old/v1/media/')[2].partition('"')[0]
    assert client.get(f"/runs/old/v1/media/{picture}").content.startswith(b"\x89PNG")


def test_a_viewer_steers_none_of_many_runs_and_an_operator_does(
    runs: TwoRuns, tokens: Tokens, scheduler: Scheduler
) -> None:
    pause = "/runs/new/v1/run/pause"
    assert client_of(runs, tokens, "viewer").post(pause, json={}).status_code == 403
    assert client_of(runs, tokens, "operator").post(pause, json={}).status_code == 202
    assert scheduler.asked == ["/v1/run/pause"]


def test_the_run_of_the_process_is_at_the_root_and_all_runs_one_link_away(
    runs: TwoRuns, tokens: Tokens
) -> None:
    client = client_of(runs, tokens, "viewer", own=runs.views["old"])
    assert 'href="/samples"' in client.get("/").text and 'href="/runs"' in client.get("/").text
    assert client.get("/v1/run").json()["step"] == 4
    assert 'href="/runs/new/"' in client.get("/runs").text


def test_a_run_that_is_not_there_is_a_page_for_people_and_a_problem_for_programs(
    runs: TwoRuns, tokens: Tokens
) -> None:
    client = client_of(runs, tokens, "viewer")
    shown = client.get("/runs/none/", headers=BROWSER)
    assert shown.status_code == 404 and "There is no run none." in shown.text
    assert "Back to all runs" in shown.text
    assert client.get("/runs/none/v1/run").json()["detail"] == "there is no run none"


async def test_an_empty_folder_has_no_runs_and_shows_how_to_begin(
    tmp_path: Path, tokens: Tokens
) -> None:
    fleet = FolderOfRuns(tmp_path / "runs")
    assert await fleet.open("digits") is None
    assert "digenrl up digits" in client_of(fleet, tokens, "viewer").get("/runs").text


async def test_a_run_without_a_folder_here_is_listed_as_well(
    runs: TwoRuns, tokens: Tokens, tmp_path: Path
) -> None:
    """A container has no folder of runs, and serves the run of its scheduler."""
    own = runs.views["new"]
    text = client_of(FolderOfRuns(tmp_path, own), tokens, "viewer", own).get("/runs").text
    assert f'href="/runs/{RUN}/"' in text and "step 4 of 30" in text


class Unlisted(FolderBackend):
    """A store that its keys may read below one prefix alone."""

    async def folders(self) -> list[str]:
        raise Unavailable("the object store refuses these keys")


async def test_the_runs_of_a_store_are_listed_where_its_keys_allow_it(
    runs: TwoRuns, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_STORE_URL", f"file://{tmp_path}/objects")
    store = (await asyncio.to_thread(stored_run, tmp_path)).store
    await store.write("models/sd3/model_index.json", b"{}")
    own = runs.views["old"]
    fleet = FolderOfRuns(tmp_path / "runs", store=store)
    client = client_of(fleet, tokens, "operator")
    assert await fleet.open(RUN) is not None and await fleet.open("none") is None
    keeping = asyncio.create_task(fleet.keep_up())
    async with asyncio.timeout(30):
        while [each.state for each in await fleet.cards()] != ["unfinished"]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    keeping.cancel()
    text = client.get("/runs").text
    assert f'href="/runs/{RUN}/"' in text and "step 4 of 30" in text and "copy-dialog" in text
    assert "copy the recipe of" not in text, "notes and copies need a folder"
    assert client.get(f"/v1/runs/{RUN}/pictures/after").content.startswith(b"\x89PNG")
    unlisted = ObjectStore(Unlisted(tmp_path / "objects"))
    text = (
        client_of(FolderOfRuns(tmp_path / "runs", own, unlisted), tokens, "viewer")
        .get("/runs")
        .text
    )
    assert f'href="/runs/{RUN}/"' in text and "the object store refuses these keys" in text


async def test_the_runs_of_a_store_that_is_a_folder_are_listed_and_opened(
    tmp_path: Path, tokens: Tokens
) -> None:
    await asyncio.to_thread(stored_run, tmp_path)
    fleet = FolderOfRuns(tmp_path / "objects")
    assert f'href="/runs/{RUN}/"' in client_of(fleet, tokens, "viewer").get("/runs").text
    view = await fleet.open(RUN)
    assert view is not None and not view.live.url
    await view.history.look()
    assert view.history.version == 4


async def test_a_run_stays_open_while_a_request_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("digenrl.local.running.fleet.OPEN_RUN_IDLE_S", 0.0)
    await asyncio.to_thread(stored_run, tmp_path)
    fleet = FolderOfRuns(tmp_path / "objects")
    keeping = asyncio.create_task(fleet.keep_up())
    async with fleet.keep_open(RUN) as view:
        await asyncio.sleep(1.5)
        assert await fleet.open(RUN) is view
    await asyncio.sleep(1.5)
    assert await fleet.open(RUN) is not view
    keeping.cancel()


async def test_a_card_has_pictures_before_and_after_and_the_change_of_the_reward(
    runs: TwoRuns, tokens: Tokens
) -> None:
    client = client_of(runs, tokens, "viewer")
    await runs.cards()
    keeping = asyncio.create_task(runs.keep_up())
    async with asyncio.timeout(30):
        while not all(each.summary.prompt for each in await runs.cards()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    keeping.cancel()
    old = next(each for each in client.get("/v1/runs").json() if each["name"] == "old")
    assert (old["summary"]["first"], old["summary"]["last"]) == (0.25, 0.65)
    assert old["summary"]["curve"] == [0.25, 0.5, 0.75, 1.0]
    assert old["summary"]["devices"] == "1 reward, 2 rollout, 1 trainer"
    assert "+0.4<" in client.get("/runs").text
    assert "gold accuracy rose by 1.4 times the spread between pictures" in client.get("/runs").text
    pictures = [client.get(f"/v1/runs/old/pictures/{kind}") for kind in ("before", "after")]
    assert [each.headers["content-type"] for each in pictures] == ["image/png"] * 2
    assert pictures[0].content != pictures[1].content


def test_runs_are_found_by_their_words_and_their_state(runs: TwoRuns, tokens: Tokens) -> None:
    client = client_of(runs, tokens, "operator")
    words = {"tags": ["baseline"], "notes": "before the <fix>"}
    assert client.post("/v1/runs/new/notes", json=words).json() == words

    def found(query: str) -> list[str]:
        return re.findall(r'id="run-(\w+)"', client.get(f"/runs?{query}").text)

    assert found("q=BASELINE") == ["new"] and found("q=fix") == ["new"]
    assert found("state=running") == [] and sorted(found("state=stopped")) == ["new", "old"]
    assert found("sort=name") == ["new", "old"]
    assert "before the &lt;fix&gt;" in client.get("/runs").text
    assert client.post("/v1/runs/none/notes", json=words).status_code == 404
    assert client.post("/v1/runs/../notes", json=words).status_code in (404, 405)


def test_runs_with_unlike_rewards_are_ordered_by_gains_in_standard_deviations(
    tmp_path: Path, tokens: Tokens
) -> None:
    summaries = {
        "large-scale": Summary(first=0.0, last=30.0, gain=0.2, gain_of="reward"),
        "small-scale": Summary(first=0.1, last=0.3, gain=1.5, gain_of="gold ocr"),
        "unknown": Summary(first=0.0, last=90.0),
    }
    for name, summary in summaries.items():
        card = local_run(tmp_path / name) / "card"
        card.mkdir()
        (card / "summary.json").write_text(summary.model_dump_json())
    text = client_of(FolderOfRuns(tmp_path), tokens, "viewer").get("/runs?sort=learned").text
    found = re.findall(r'id="run-([\w-]+)"', text)
    assert found == ["small-scale", "large-scale", "unknown"]
    assert "gold ocr rose by 1.5 times the spread between pictures" in text


def test_a_failed_run_shows_why(tmp_path: Path, tokens: Tokens) -> None:
    folder = local_run(tmp_path / "lost")
    RunProgress("failed", 3, 30, failure="the scorer said <NaN>").write(folder)
    text = client_of(FolderOfRuns(tmp_path), tokens, "viewer").get("/runs").text
    assert "/runs/lost/logs?level=error#failure" in text and "the scorer said &lt;NaN&gt;" in text
    cause = Summary(made_at="failed 3", cause="reward: ink: KeyError")
    (folder / "card").mkdir()
    (folder / "card" / "summary.json").write_text(cause.model_dump_json())
    text = client_of(FolderOfRuns(tmp_path), tokens, "viewer").get("/runs").text
    assert '#failure">reward: ink: KeyError</a>' in text


def test_a_card_names_the_measure_of_its_reward_and_sorts_by_it(
    tmp_path: Path, tokens: Tokens
) -> None:
    for name, summary in {"good": Summary(first=0.1, last=0.3), "new": Summary()}.items():
        card = local_run(tmp_path / name) / "card"
        card.mkdir()
        (card / "summary.json").write_text(summary.model_dump_json())
    text = client_of(FolderOfRuns(tmp_path), tokens, "viewer").get("/runs?sort=reward").text
    assert re.findall(r'id="run-([\w-]+)"', text) == ["good", "new"]
    named = re.findall(
        r'"quiet">([\w ,]+reward[\w ,]*)</span>\s+<span class="reward">([\d.]+)', text
    )
    assert named == [("evaluated reward", "0.3"), ("training reward, not evaluated yet", "0.5")]


def test_a_recipe_is_copied_with_changes_and_a_wrong_one_is_refused(
    tmp_path: Path, tokens: Tokens
) -> None:
    fleet = FolderOfRuns(tmp_path)
    local_run(tmp_path / "first")
    client = client_of(fleet, tokens, "operator")
    wanted = {"name": "second", "changes": {"trainer.learning_rate": 0.5, "run.steps": 7}}
    answer = client.post("/v1/runs/first/copies", json=wanted)
    assert answer.status_code == 201
    recipe = load_recipe(tmp_path / "second.json")
    assert (recipe.run.name, recipe.run.steps) == ("second", 7)
    assert recipe.trainer.learning_rate == 0.5
    assert answer.json()["command"] == f"digenrl up {tmp_path / 'second.json'}"
    for changes in ({"trainer.lr": 1}, {"run.steps": "many"}, {"run.seed = 1\nbase": "x"}):
        wrong = client.post("/v1/runs/first/copies", json={"name": "third", "changes": changes})
        assert wrong.status_code == 422, changes
    assert not (tmp_path / "third.json").exists()
    again = client.post("/v1/runs/first/copies", json=wanted)
    assert (again.status_code, again.json()["detail"]) == (
        422, "name: second exists; choose another"
    )  # fmt: skip


@pytest.mark.parametrize("may_start", [False, True])
def test_runs_are_started_only_where_the_page_was_allowed_to(
    tmp_path: Path, tokens: Tokens, may_start: bool
) -> None:
    client = client_of(FolderOfRuns(tmp_path), tokens, "operator", may_start=may_start)
    answer = client.post("/v1/runs/none/start", json={})
    said = answer.json()["detail"]
    assert answer.status_code == (404 if may_start else 403)
    assert ("no run none" if may_start else "--may-start") in said
    viewer = client_of(FolderOfRuns(tmp_path), tokens, "viewer", may_start=may_start)
    assert viewer.post("/v1/runs/none/start", json={}).status_code == 403


@pytest.mark.clock
@pytest.mark.slow
async def test_200_runs_of_10_000_steps_are_shown_within_half_a_second(
    tmp_path: Path, tokens: Tokens
) -> None:
    summary = Summary(
        made_at="finished 10000", prompt="a red bicycle on a beach", first=0.2, last=0.8,
        curve=[at / 40 for at in range(41)], devices="1 reward, 8 rollout, 8 trainer",
    )  # fmt: skip
    for number in range(200):
        folder = local_run(tmp_path / f"run-{number}", "finished", 10_000)
        (folder / "card").mkdir()
        (folder / "card" / "summary.json").write_text(summary.model_dump_json())
    client, found = client_of(FolderOfRuns(tmp_path), tokens, "operator"), []
    for _ in range(5):
        began = time.perf_counter()
        text = client.get("/runs").text
        found.append(time.perf_counter() - began)
    assert text.count('class="card"') == 200
    print(f"home of 200 runs: {sorted(found)[2]:.3f} s")  # noqa: T201
    assert sorted(found)[2] <= 0.5
