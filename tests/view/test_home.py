"""The page of all runs, and each run below an address of its own."""

from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.local.running.fleet import FolderOfRuns
from digenrl.local.secrets.tokens import Tokens, load_tokens
from digenrl.view.home import RunCard, create_home
from digenrl.view.pages import View
from shared.process.http_access import Access, Role, TokenFile
from shared.process.http_guard import Guard, own_names
from tests.follow.runs import RUN
from tests.view.sight import Scheduler
from tests.view.stored import stored_run

BROWSER = {"accept": "text/html"}


class TwoRuns:
    """A finished run, and the same run in progress, as one folder."""

    def __init__(self, folder: Path, scheduler: Scheduler) -> None:
        store = stored_run(folder).store
        over, live = LiveRun("", httpx.AsyncClient()), scheduler.live
        self.views = {
            "old": View(RunHistory(store, RUN), over), "new": View(RunHistory(store, RUN), live)
        }  # fmt: skip

    async def cards(self) -> list[RunCard]:
        return [
            RunCard(name=each, state="running", step=4, steps=30, reward=0.5, age_seconds=60.0)
            for each in self.views
        ]

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


def client_of(runs: TwoRuns, tokens: Tokens, role: Role, own: View | None = None) -> TestClient:
    access = Access(TokenFile(tokens.folder / "api_tokens.json"))
    guard = Guard(create_home(runs, access, own), own_names("127.0.0.1"), access=access)
    return TestClient(guard, base_url="http://localhost", headers=tokens.headers(role))


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


async def test_an_empty_folder_has_no_runs_and_shows_how_to_begin(tmp_path: Path) -> None:
    fleet = FolderOfRuns(tmp_path / "runs")
    assert list(await fleet.cards()) == [] and await fleet.open("digits") is None
