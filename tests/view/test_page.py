"""The run's page: what it shows of a run in a folder of objects, to whom, and what it refuses."""

import asyncio
import hashlib
import html
import re
from html.parser import HTMLParser
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.api.status import read_run
from digenrl.evaluation.media import as_png
from digenrl.evaluation.records import EvaluationRecord, Evaluations, KeptSample, Quality
from digenrl.local.secrets.tokens import Tokens, load_tokens
from digenrl.reading.reading import RunReading
from digenrl.view.server import PAGES, View, create_app
from shared.errors import Unavailable
from shared.process.http_access import Access, TokenFile
from shared.process.http_guard import Guard, own_names
from shared.run.layout import timeline_key, usage_key
from shared.run.log_entries import Work
from shared.run.usage import BatchUsage, Timeline
from tests import examples
from tests.follow.runs import RUN, Run
from tests.paths import ROOT
from tests.readings import LOAD
from tests.readings import RUN as NOW
from tests.run_log import letter
from tests.view.sight import Scheduler

PICTURES = {version: as_png(np.full((1, 8, 8), version, np.uint8)) for version in (0, 4)}
PROMPT = 'a "digit" <three>'
ALARM = "the training reward rose while the gold reward fell"


async def evaluate(run: Run, version: int, video: bytes | None = None) -> None:
    folder = Evaluations(run.store, RUN, "a" * 64)
    still = await run.store.put(folder.media_folder, PICTURES[version], suffix=".png")
    media = video and await run.store.put(folder.media_folder, video, suffix=".mp4")
    record = EvaluationRecord(
        run=RUN, policy=examples.policy(version), settings="a" * 64, worker="report", seconds=1.0,
        quality=Quality(reward=0.25 + version / 10, num_samples=1, gold={"other": 0.5}),
        alarms=(ALARM,) if version else (),
        samples=(
            KeptSample(prompt=PROMPT, media=media or still, still=still, right=bool(version)),
        ),
    )  # fmt: skip
    await folder.add(record)


async def fill(run: Run) -> None:
    for version in PICTURES:
        await evaluate(run, version)
    for batch in range(4):
        devices = {"rollout-0": {"generating": 3.0, "waiting_for_trainer": 1.0}}
        usage = BatchUsage.model_validate({
            "batch": batch, "seconds": 4.0, "devices": devices, "samples": 128,
            "forecast_seconds": 3.5 if batch else None, "bound_seconds": 2.0 if batch else None,
        })  # fmt: skip
        await run.store.create(usage_key(RUN, batch), usage.model_dump_json().encode())
        changes = ((0.0, "generating"), (3.0, "waiting_for_trainer"))
        line = Timeline.model_validate(
            {"batch": batch, "seconds": 4.0, "devices": {"rollout-0": changes}}
        )
        await run.store.create(timeline_key(RUN, batch), line.encode())


def filled(folder: Path) -> Run:
    run = Run(folder / "objects").begin()
    run.commit(4)
    asyncio.run(fill(run))
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that no test changes."""
    return filled(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return load_tokens(tmp_path_factory.mktemp("tokens"))


def client_of(run: Run, tokens: Tokens, live: LiveRun | None = None) -> TestClient:
    access = Access(TokenFile(tokens.folder / "api_tokens.json"))
    view = View(RunHistory(run.store, RUN), live or LiveRun("", httpx.AsyncClient()))
    guard = Guard(create_app(view, access), own_names("127.0.0.1"), access=access)
    return TestClient(guard, base_url="http://localhost", headers=tokens.headers("viewer"))


@pytest.fixture(scope="module")
def client(run: Run, tokens: Tokens) -> TestClient:
    """A client whose headers no test changes."""
    return client_of(run, tokens)


class Assets(HTMLParser):
    """Collects what a page loads, and elements without an end."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in ("script", "img", "link", "video"):
            self.loaded.append(named.get("src") or named.get("href") or "")
            assert tag != "script" or named.get("src"), "no script stands in the page"
        if tag not in ("meta", "link", "img", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("page", PAGES)
def test_each_page_is_whole_and_loads_nothing_from_elsewhere(client: TestClient, page: str) -> None:
    answer = client.get("/" if page == "overview" else f"/{page}")
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    found = Assets()
    found.feed(answer.text)
    assert found.open == []
    for address in found.loaded:
        assert address == "data:," or client.get(address).status_code == 200, address
    assert len(found.loaded) >= 5
    part = client.get(answer.url.path, params={"part": ""}).text
    assert "<html" not in part and "step 4 of 30" in part


def test_the_overview_says_what_happened_and_what_would_help(client: TestClient) -> None:
    text = html.unescape(client.get("/").text)
    assert "not running; stopped after step 4" in text
    assert "at work 75% of their time" in text and "wait for training" in text
    assert f"reward hacking? {ALARM}" in text
    assert "the schedule's forecast is" in text
    assert "may help" not in text, "nothing can be changed any more"
    assert "Where samples wait" not in text, "nothing waits any more"
    assert re.search(r"gold: other</th><td>0.500</td><td>0.500", text)


def test_the_overview_begins_with_one_prompt_and_seed_from_version_0_to_now(
    client: TestClient,
) -> None:
    text = client.get("/").text
    strip = text.partition("</ol>")[0]
    assert re.findall(r"version (\d+)</p>", re.sub(r" <b>.*?</b>", "", strip)) == ["0", "4"]
    names = re.findall(r'<img src="(/v1/media/[^"]+)"', strip)
    assert [client.get(name).content for name in names] == [PICTURES[0], PICTURES[4]]
    assert text.index("</ol>") < text.index("at work 75%") < text.index("data-chart")
    assert client.get("/", params={"prompt": 99}).status_code == 200, "the last sample"
    assert client.get("/", params={"prompt": -1}).status_code == 422


def test_a_video_of_the_overview_plays_on_hover(tokens: Tokens, tmp_path: Path) -> None:
    run = Run(tmp_path / "objects").begin()
    run.commit(1)
    asyncio.run(evaluate(run, 0, video=b"an mp4"))
    client = client_of(run, tokens)
    [video] = re.findall(r"<video [^>]+data-hover[^>]+>", client.get("/").text)
    [source] = re.findall(r'src="([^"]+\.mp4)"', video)
    assert client.get(source).content == b"an mp4" and 'poster="/v1/media/' in video
    part = client.get(source, headers={"range": "bytes=3-4"})
    assert (part.status_code, part.content) == (206, b"mp"), "browsers move in a video by ranges"


def test_the_recipe_marks_what_differs_from_the_defaults(client: TestClient) -> None:
    changed, _, rest = client.get("/recipe").text.partition("Keys at their defaults")
    assert "run.steps" in changed and "Optimizer steps." in changed
    assert "run.seed" in rest and "run.seed" not in changed


def test_timelines_of_the_newest_batches_come_in_order(client: TestClient) -> None:
    found = client.get("/data/timeline?batches=2").json()
    assert [each["batch"] for each in found] == [2, 3]
    assert found[0]["devices"]["rollout-0"][1] == [3.0, "waiting_for_trainer"]
    assert client.get("/data/timeline?batches=1000").status_code == 422


def test_samples_are_compared_and_prompts_are_text(client: TestClient) -> None:
    text = client.get("/samples").text
    assert PROMPT not in text and "a &#34;digit&#34; &lt;three&gt;" in text
    names = re.findall(r'src="(/v1/media/[^"?]+)', text)
    assert [client.get(name).content for name in names] == [PICTURES[0], PICTURES[4]]
    assert client.get("/samples?version=2").status_code == 404
    for name in ("x.png", "..%2f..%2frecipe.json", "00000000.json", "a" * 200):
        assert client.get(f"/v1/media/{name}").status_code in (404, 409, 422)


def test_a_plan_that_is_refused_keeps_what_was_asked(client: TestClient) -> None:
    shown = client.get("/plan", params={"hosts": "h100x8*100", "staleness": "1"}).text
    assert "at most 512 devices" in shown and 'value="h100x8*100"' in shown
    assert '<option value="1" selected>' in shown
    named = {"hosts": "h100x8*100", "profile": "flux1-dev"}
    assert "<option selected>flux1-dev</option>" in client.get("/plan", params=named).text
    unknown = client.get("/plan", params={"hosts": "h100x8", "profile": "../x"}).text
    assert "profile: ../x is none of flux1-dev" in unknown
    assert "hosts: say kinds and GPUs" in client.get("/plan", params={"hosts": "<b>"}).text


def test_nobody_sees_it_without_a_token_and_a_viewer_steers_nothing(
    run: Run, tokens: Tokens
) -> None:
    client = client_of(run, tokens)
    client.headers.pop("authorization")
    assert client.get("/").status_code == 401
    client.headers.update(tokens.headers("viewer"))
    assert client.post("/v1/run/pause", json={}).status_code == 403
    operator = client_of(run, tokens)
    operator.headers.update(tokens.headers("operator"))
    answer = operator.post("/v1/run/pause", json={})
    over = "the run is over; `digenrl up RECIPE --resume` resumes it"
    assert (answer.status_code, answer.json()["detail"]) == (409, over)


def test_a_link_leads_to_the_first_page(run: Run, tokens: Tokens) -> None:
    client = client_of(run, tokens)
    path = client.post("/v1/codes").json()["path"]
    client.headers.pop("authorization")
    answer = client.get(path)
    assert answer.url.path == "/" and answer.status_code == 200


def scheduler_of(answers: dict[str, object], asked: list[str]) -> LiveRun:
    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.method} {request.url.path}")
        found = answers.get(request.url.path)
        return httpx.Response(404 if found is None else 200, json=found or {"detail": "no"})

    return LiveRun("http://scheduler", httpx.AsyncClient(transport=httpx.MockTransport(answer)))


def test_what_a_run_does_now_is_asked_from_its_scheduler(run: Run, tokens: Tokens) -> None:
    now = NOW | {
        "run": RUN, "waiting_for": "rollout", "missing_workers": ["reward"], "num_dead_letters": 2,
        "num_workers": {"rollout": 2},
    }  # fmt: skip
    flying = {"batch": 4, "seconds": 1.0, "devices": {}}
    answers: dict[str, object] = {
        "/v1/run": now,
        "/v1/load": LOAD,
        "/v1/batches/4/timeline": flying,
        "/v1/run/pause": {"id": "1"},
    }
    asked: list[str] = []
    client = client_of(run, tokens, scheduler_of(answers, asked))
    client.headers.update(tokens.headers("operator"))
    text = client.get("/").text
    assert "running, waits for generation" in text and "1 min 23 s left" in text
    assert "no worker of: reward" in text and "dead letters: 2 are open" in text
    assert '<a href="/letters">the page of failed work</a> has why' in text
    assert 'data-post="/v1/run/pause"' in text
    assert "slower than its schedule explains" in text and "61.0 s" in text and "<b>late" in text
    assert "0.9 s per sample, the mean is 0.42" in text
    assert [each["batch"] for each in client.get("/data/timeline").json()] == [1, 2, 3, 4]
    assert client.post("/v1/run/pause", json={}).json() == {"id": "1"}
    assert client.post("/v1/run/stop", json={}).status_code == 404, "as the scheduler answers"
    assert "POST /v1/run/pause" in asked


def test_a_click_and_a_program_s_request_are_seen_at_once_on_the_page_and_by_the_api(
    run: Run, tokens: Tokens
) -> None:
    """A button posts to the API, so that there is one cache, which every change clears."""
    client = client_of(run, tokens, Scheduler().live)
    client.headers.update(tokens.headers("operator"))

    def phases() -> tuple[str, str]:
        [status] = re.findall(r'class="status"><b>(\w+)', client.get("/").text)
        return status, client.get("/v1/run").json()["phase"]

    for _ in range(2):
        assert phases() == ("running", "running")
        [button] = re.findall(r'id="pause" data-post="([^"]+)"', client.get("/").text)
        assert client.post(button, json={}).status_code == 202
        assert phases() == ("paused", "paused")
        assert client.post("/v1/run/resume").status_code == 202


def test_dead_letters_are_shown_and_settled_by_operators(tokens: Tokens, tmp_path: Path) -> None:
    run, scheduler = filled(tmp_path), Scheduler()
    reason, work = "the scorer said <NaN>", Work(batch=4, group=5)
    scheduler.keep(letter(1, kind="unscored", reason=reason, work=work))
    client = client_of(run, tokens, scheduler.live)
    text, retry = client.get("/letters").text, "/v1/dead-letters/1/retry"
    assert "step 5 (batch 4), group 5" in text and "the scorer said &lt;NaN&gt;" in text
    assert "data-post" not in text, "a viewer settles nothing"
    assert client.post(retry, json={}).status_code == 403
    client.headers.update(tokens.headers("operator"))
    assert f'data-post="{retry}"' in client.get("/letters").text
    assert client.post(retry, json={}).status_code == 202 and scheduler.asked == [retry]


def test_versions_say_who_has_loaded_them(run: Run, tokens: Tokens) -> None:
    newest = {
        "version": 4, "weights_digest": "0" * 64, "weights": "key", "trained_from_batch": 3,
        "reward_mean": 0.5, "onpolicy_ratio_error": None, "adopted_by": ["rollout-0", "rollout-1"],
    }  # fmt: skip
    client = client_of(run, tokens, scheduler_of({"/v1/run": NOW, "/v1/versions": [newest]}, []))
    assert "rollout-0, rollout-1" in client.get("/versions").text


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/nowhere", 404, "There is no page /nowhere."),
        ("/batches?step=9999", 404, "Step 9999 is not committed."),
        ("/batches?step=<b>", 422, "Query.step: Input should be a valid integer"),
    ],
)
def test_a_browser_is_led_back_from_an_address_that_does_not_exist(
    client: TestClient, path: str, status: int, said: str
) -> None:
    shown = client.get(path, headers={"accept": "text/html,*/*;q=0.8"})
    assert shown.status_code == status and said in html.unescape(shown.text)
    assert "<nav" in shown.text and '<a href="/">Back to the overview</a>' in shown.text
    assert (
        "step 4 of 30" in shown.text and "default-src" in shown.headers["content-security-policy"]
    )
    told = client.get(path)
    assert told.headers["content-type"] == "application/problem+json"
    assert (told.status_code, told.json()["status"]) == (status, status)
    assert client.get("/data/nowhere", headers={"accept": "text/html"}).json()["status"] == 404


def test_a_fault_of_the_store_is_a_problem_for_browsers_too(
    run: Run, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(_: RunHistory) -> None:
        raise Unavailable("the store does not answer")

    monkeypatch.setattr(RunHistory, "look", look)
    told = client.get("/", headers={"accept": "text/html"})
    assert (told.status_code, told.json()["detail"]) == (503, "the store does not answer")


def test_vendored_files_are_those_that_were_taken_over() -> None:
    static = ROOT / "digenrl" / "view" / "static"
    listed = [each.split() for each in (static / "VENDORED.sha256").read_text().splitlines()]
    assert {name for _, name in listed} == {each.name for each in static.glob("*.min.*")}
    for digest, name in listed:
        assert hashlib.sha256((static / name).read_bytes()).hexdigest() == digest, name


async def test_readers_share_a_page_and_a_commit_is_seen_at_once(
    tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("digenrl.api.run_history.POLL_S", 0.0)
    monkeypatch.setattr("digenrl.view.pages.RENDERED_S", 60.0)
    readings = []

    async def counted(history: RunHistory, live: LiveRun) -> RunReading:
        readings.append(await read_run(history, live))
        return readings[-1]

    monkeypatch.setattr("digenrl.view.pages.read_run", counted)
    run = await asyncio.to_thread(filled, tmp_path)
    view = View(RunHistory(run.store, RUN), LiveRun("", httpx.AsyncClient()))
    transport = httpx.ASGITransport(create_app(view, Access(is_open=True)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        first = await asyncio.gather(*(client.get("/?part=") for _ in range(20)))
        assert all("step 4 of" in each.text for each in first) and len(readings) == 1
        await asyncio.to_thread(run.commit, 1)
        assert "step 5 of" in (await client.get("/?part=")).text
