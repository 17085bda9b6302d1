"""The gallery: which tiles, in which order, at which size; and prompts of one's own."""

import asyncio
import io
import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from digenrl.evaluation.media import as_png
from digenrl.evaluation.records import EvaluationRecord, Evaluations, KeptSample, Quality
from digenrl.local.secrets.tokens import load_tokens
from digenrl.view.gallery import arranged, count_changes, scorers_of, tiles_of
from digenrl.view.server import View, create_app
from shared.process.http_access import Access, TokenFile
from shared.process.http_guard import Guard, own_names
from shared.run.layout import evaluations_folder
from tests import examples
from tests.follow.runs import RUN, Run
from tests.view.stored import stored_run


def evaluation(version: int, *scores: float | None, prompts: str = "ab") -> EvaluationRecord:
    """Return an evaluation of as many samples, which have the prompts in turn."""
    samples = tuple(
        KeptSample(
            prompt=f"prompt {prompts[number % len(prompts)]}", scores={"reward": score, "x": 1.0},
            media=examples.ref(f"{version}-{number}"), still=examples.ref(f"{version}-{number}"),
        )
        for number, score in enumerate(scores)
    )  # fmt: skip
    return EvaluationRecord(
        run=RUN, policy=examples.policy(version), settings="a" * 64, worker="w", seconds=1.0,
        quality=Quality(reward=0.5, num_samples=len(samples)), samples=samples,
    )  # fmt: skip


BEFORE, AFTER = evaluation(0, 0.1, 0.2, 0.3, None), evaluation(9, 0.5, 0.1, 0.35, 0.4)


def test_tiles_pair_the_samples_of_one_prompt_and_noise() -> None:
    tiles = tiles_of(BEFORE, AFTER, "reward")
    assert [each.prompt for each in tiles] == ["prompt a", "prompt b", "prompt a", "prompt b"]
    assert [each.change and round(each.change, 2) for each in tiles] == [0.4, -0.1, 0.05, None]
    fewer = tiles_of(evaluation(0, 0.1, 0.2, prompts="ba"), AFTER, "reward")
    assert [(each.number, each.before[-3:]) for each in fewer] == [(0, "0-1"), (1, "0-0")]


@pytest.mark.parametrize(
    ("prompt", "sort", "numbers"),
    [
        ("", "order", [0, 1, 2, 3]), ("PROMPT B", "order", [1, 3]), ("", "best", [0, 3, 2, 1]),
        ("", "worst", [1, 2, 3, 0]), ("", "gained", [0, 2, 1, 3]), ("", "lost", [1, 2, 0, 3]),
    ],
)  # fmt: skip
def test_tiles_are_filtered_and_sorted(prompt: str, sort: str, numbers: list[int]) -> None:
    """A tile without a score in both versions is the last by its change."""
    tiles = tiles_of(BEFORE, AFTER, "reward")
    assert [each.number for each in arranged(tiles, prompt, sort)] == numbers  # type: ignore[arg-type]


def test_two_versions_are_summed_up_over_the_samples_that_both_could_score() -> None:
    counts = count_changes(tiles_of(BEFORE, AFTER, "reward"))
    assert counts is not None and (counts.higher, counts.lower) == (2, 1)
    assert round(counts.mean_before, 3) == 0.2 and round(counts.mean_after, 3) == 0.317
    assert count_changes(tiles_of(BEFORE, AFTER, "unknown")) is None
    assert scorers_of(AFTER) == ["reward", "x"]


def client_of(run: Run, folder: Path) -> TestClient:
    tokens = load_tokens(folder)
    access = Access(TokenFile(tokens.folder / "api_tokens.json"))
    app = create_app(View(RunHistory(run.store, RUN), LiveRun("", httpx.AsyncClient())), access)
    guard = Guard(app, own_names("127.0.0.1"), access=access)
    return TestClient(guard, base_url="http://localhost", headers=tokens.headers("viewer"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    folder = tmp_path_factory.mktemp("run")
    return client_of(stored_run(folder, timelines=False), folder)


def numbers(text: str) -> list[int]:
    return [int(each) for each in re.findall(r'<li data-number="(\d+)"', text)]


def test_the_address_decides_what_the_gallery_shows(client: TestClient) -> None:
    text = client.get("/samples?sort=worst&scorer=gold+other&view=beside&size=l").text
    assert numbers(text) == [0, 1, 2, 3, 4, 5] and 'data-view="beside" data-size="l"' in text
    assert "The mean gold other goes from 0.125 to <b>0.125</b>" in text
    assert numbers(client.get("/samples?prompt=digit+4").text) == [4]
    assert 'prompt with "seven"' in client.get("/samples?prompt=seven").text
    assert client.get("/samples?scorer=none").status_code == 404
    assert client.get("/samples?view=upside-down").status_code == 422
    assert "higher" not in client.get("/samples?version=0").text, "it differs from nothing"


def test_large_pictures_are_reduced_for_tiles(tmp_path: Path) -> None:
    run = stored_run(tmp_path, timelines=False)
    png = as_png(np.zeros((3, 600, 900), np.uint8))
    ref = asyncio.run(run.store.put(f"{evaluations_folder(RUN)}/media", png, suffix=".png"))
    record = evaluation(2, 0.5).model_copy(
        update={"samples": (KeptSample(prompt="large", media=ref, still=ref),)}
    )
    asyncio.run(Evaluations(run.store, RUN, "a" * 64).add(record))
    name, client = f"/v1/media/{ref.key.rpartition('/')[2]}", client_of(run, tmp_path)
    small = client.get(f"{name}?small=1")
    assert small.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(small.content)).size == (448, 299)
    assert client.get(name).content == png
