"""Comparisons of versions and runs: openly, and blind with a tally."""

import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from fastapi.testclient import TestClient

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.reading.blind import blind_order
from digenrl.view.compare import Comparisons, compare_pages
from digenrl.view.markup import templates
from digenrl.view.pages import WALL, View, render
from tests.follow.runs import RUN
from tests.view.stored import stored_run

OLD, NEW = f"{RUN}@0", f"{RUN}@4"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    view = View(
        RunHistory(stored_run(tmp_path_factory.mktemp("run"), timelines=False).store, RUN),
        LiveRun("", httpx.AsyncClient()),
    )
    app, environment = FastAPI(), templates()

    async def open_run(name: str) -> View | None:
        return view if name == RUN else None

    async def names() -> list[str]:
        return [RUN, "other"]

    async def page(request: Request, name: str, **fields: Any) -> HTMLResponse:
        request.scope[WALL] = "/runs"
        return render(environment, request, "all", page=name, **fields)

    app.include_router(compare_pages(Comparisons(open_run, names), page))
    return TestClient(app)


def test_two_versions_are_compared_with_spread_at_the_same_noise(client: TestClient) -> None:
    text = client.get("/compare", params={"side": [OLD, NEW]}).text
    assert "It is not certain which scores higher" in text, "half of the pictures gained"
    assert "The recipes are the same." in text and "from the same prompts and noise" in text
    assert text.count('class="before"') == 6
    assert len(set(re.findall(r"data-colour=\"(\d)\"", text))) == 2, "versions of one run differ"
    assert client.get("/compare", params={"side": "nobody"}).status_code == 404
    assert client.get("/compare").status_code == 200


def test_pairs_are_shown_page_by_page_in_the_order_of_their_change(client: TestClient) -> None:
    def shown(**query: str | int) -> tuple[list[str], str]:
        text = client.get("/compare", params={"side": [OLD, NEW], **query}).text
        return re.findall('class="words" title="the digit (.)"', text), text

    assert shown()[0] == [*"012345"] and shown(sort="gained")[0] == [*"543210"]
    prompts, text = shown(sort="lost", after=4)
    assert prompts == ["4", "5"] and "pairs 5 to 6 of 6" in text
    assert f'href="?side={OLD}&amp;side={NEW}&amp;sort=lost#pairs"' in text, "the first ones"


def test_a_blind_comparison_hides_the_sides_and_counts_the_votes(client: TestClient) -> None:
    first = client.get("/compare/blind", params={"side": [OLD, NEW]})
    seed = first.url.params["seed"]
    assert first.history, "the seed becomes part of the address"
    order = blind_order(6, int(seed))
    newer = "".join("l" if each.is_swapped else "r" for each in order[:5])
    asked = {"side": [OLD, NEW], "seed": seed, "votes": newer}
    assert "pair 6 of 6" in client.get("/compare/blind", params=asked).text

    def status(num_votes: int) -> str:
        text = client.get("/compare/blind", params={**asked, "votes": newer[:num_votes]}).text
        return text.partition('role="status">')[2].partition("</p>")[0]

    assert "No difference is certain yet" in status(1) and "in 1 of 1 pairs" in status(1)
    assert "between 21 % and 100 %" in status(1) and "version 4" not in status(3), "still hidden"
    assert f"{RUN}, version 4 is better." in status(4), "four votes decide"
    text = client.get("/compare/blind", params={**asked, "result": "1"}).text
    assert f"{RUN}, version 4 is better." in text and "in 5 of 5 pairs (100 %)" in text
    assert "between 57 % and 100 %" in text
    tied = client.get("/compare/blind", params={**asked, "votes": "tttttt"}).text
    assert "Nothing is judged yet" in tied
    assert client.get("/compare/blind", params={"side": NEW, "seed": 1}).status_code == 422
