"""What became of each group and sample of a committed batch, from the store alone."""

import asyncio
import io
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.numpy
from fastapi.testclient import TestClient
from PIL import Image

from digenrl.api import models
from digenrl.api.front import api_routes
from digenrl.api.live import LiveRun
from digenrl.api.run_history import RunHistory
from shared.run.layout import batch_folder
from shared.run.log_entries import PhaseChange, Request, Work
from shared.run.previews import preview_key
from shared.store.previews import pack_previews
from tests.api.past_run import PIXELS, past_run
from tests.api.served import app_of
from tests.follow.runs import RUN, Run
from tests.run_log import append, letter


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return past_run(tmp_path)


@pytest.fixture
def client(run: Run) -> TestClient:
    return TestClient(
        app_of(api_routes(RunHistory(run.store, RUN), LiveRun("", httpx.AsyncClient())))
    )


def pages(client: TestClient, path: str, name: str, limit: int = 3) -> list[dict[str, Any]]:
    found, after = [], ""
    while True:
        page = client.get(path, params={"limit": limit, "after": after}).json()
        found += page[name]
        if page["next"] is None:
            return found
        assert len(page[name]) == limit
        after = page["next"]


def test_a_batch_s_groups_say_what_became_of_each(client: TestClient) -> None:
    first, second = pages(client, "/v1/batches/0/groups", "groups", limit=1)
    assert (first["reward_mean"], first["num_samples"], first["letters"]) == (0.4375, 4, [])
    assert (second["letters"], second["generated_by"]) == ([1], ["rollout-0-a"])
    assert first["prompt"]
    assert client.get("/v1/batches/1/groups").status_code == 404


def test_what_could_not_be_scored_comes_after_the_worst_and_the_best_samples_and_is_counted(
    client: TestClient,
) -> None:
    path = "/v1/batches/0/samples"
    found = pages(client, path, "samples")
    assert [(each["group"], each["sample"]) for each in found] == [
        (group, sample) for group in (0, 1) for sample in range(4)
    ]
    worst = client.get(path, params={"order": "worst"}).json()["samples"]
    assert [each["reward"] for each in worst] == [0.0, 0.25, 0.5, 0.5, 0.5, 0.75, 1.0, None]
    assert worst[0]["advantage"] < 0 and worst[0]["scores"] == {"proxy": 0.0}
    assert worst[-1]["why_not"] == "it could not be scored" and not worst[-1]["trained"]
    assert worst[-1]["letters"] == [1] and worst[-1]["attempt"] == 1
    alone = client.get(path, params={"order": "unscored"}).json()
    assert alone["samples"] == worst[-1:] and alone["next"] is None
    [group] = alone["unscored"]
    assert (group["group"], group["num_samples"]) == (1, 1)
    best = client.get(path, params={"order": "best"}).json()["samples"]
    assert [each["reward"] for each in best] == [1.0, 0.75, 0.5, 0.5, 0.5, 0.25, 0.0, None]


def test_the_reason_of_samples_without_a_score_is_said_once(client: TestClient, run: Run) -> None:
    reason, work = "mine: ValueError: no template", Work(batch=0, group=1, first_sample=0)
    unscored = letter(2, kind="unscored", reason=reason, work=work)
    asyncio.run(append(run.store, RUN, unscored))
    page = models.SamplePage.model_validate(client.get("/v1/batches/0/samples").json())
    said = "1 sample has no score: group 1 (mine: ValueError: no template)"
    assert page.said_of_unscored == said
    more = [group.model_copy(update={"group": 4, "num_samples": 2}) for group in page.unscored]
    both = page.model_copy(update={"unscored": page.unscored + more})
    assert both.said_of_unscored.startswith("3 samples have no score: groups 1, 4 (mine: ")


def test_a_reward_is_shown_as_the_sum_of_its_scores_unless_each_is_normalised() -> None:
    scores = {"proxy": 0.018, "mine": 0.254}
    given = models.EXAMPLE_SAMPLE | {"scores": scores, "weights": {"proxy": 1.0, "mine": 0.1}}
    sample = models.SampleHistory.model_validate(given)
    assert sample.made_of == "1 x proxy 0.018 + 0.1 x mine 0.254"
    normalised = models.SampleHistory.model_validate(given | {"normalised": True})
    assert normalised.made_of == "proxy 0.018, mine 0.254"
    said = models.SamplePage(samples=[normalised], next=None).said_of_weights
    assert said.startswith('rewards = "normalised"') and said.endswith("1 x proxy + 0.1 x mine")
    assert models.SamplePage(samples=[sample], next=None).said_of_weights == ""


def test_a_sample_s_picture_is_there_until_it_is_deleted_and_then_gone(
    client: TestClient, run: Run
) -> None:
    sample = client.get("/v1/batches/0/samples/1/2").json()
    assert sample["media_gone"] is None
    answer = client.get(sample["media"])
    assert answer.headers["content-type"] == "image/png"
    image = Image.open(io.BytesIO(answer.content))
    assert image.size == (5, 2) and image.getpixel((4, 1)) == tuple(PIXELS[2, :, 1, 4])
    asyncio.run(run.store.delete_folder(batch_folder(RUN, 0)))
    gone = client.get("/v1/batches/0/samples/1/1/media")  # no reader has seen it
    assert gone.status_code == 410 and "2 newest" in gone.json()["detail"]
    after = client.get("/v1/batches/0/samples/1/2").json()
    assert after["media"] is None and "2 newest" in after["media_gone"]
    assert client.get("/v1/batches/0/samples/1/9").status_code == 404
    assert client.get("/v1/batches/0/samples/1/9/media").status_code == 404


def test_of_what_was_deleted_a_preview_may_be_left(client: TestClient, run: Run) -> None:
    previews = pack_previews(safetensors.numpy.save({"images": PIXELS}), 8192)
    asyncio.run(run.store.write(preview_key(RUN, 0, 1, 0, 1), previews))
    asyncio.run(run.store.delete_folder(batch_folder(RUN, 0)))
    sample = client.get("/v1/batches/0/samples/1/2").json()
    assert "2 newest" in sample["media_gone"]
    answer = client.get(sample["media"])
    assert answer.headers["content-type"] == "image/png"
    assert Image.open(io.BytesIO(answer.content)).getpixel((4, 1)) == tuple(PIXELS[2, :, 1, 4])
    shown = client.get("/v1/batches/0/samples").json()["samples"]
    assert [each["media"] is None for each in shown] == [True] * 4 + [False] * 4
    assert client.get("/v1/batches/0/samples/0/2/media").status_code == 410
    asyncio.run(run.store.write(preview_key(RUN, 0, 1, 0, 1), b"<html>"))  # no picture
    damaged = client.get("/v1/batches/0/samples/1/1/media")
    assert damaged.status_code == 410, "only pictures are shown"


def test_the_audit_log_has_requests_alone_newest_first(client: TestClient, run: Run) -> None:
    async def fill() -> None:
        for number in range(1, 8):
            entry = (
                PhaseChange(phase="running")
                if number % 3 == 0
                else Request(caller="ann", role="operator", operation=str(number), status=202)
            )
            await append(run.store, RUN, entry)

    asyncio.run(fill())
    made_up = client.get("/v1/audit", params={"limit": 1, "after": "999999999"}).json()
    assert made_up["requests"] == client.get("/v1/audit?limit=1").json()["requests"]
    found = pages(client, "/v1/audit", "requests", limit=2)
    assert [each["operation"] for each in found] == ["7", "5", "4", "2", "1"]


def test_storage_says_what_takes_space_and_for_how_long(client: TestClient) -> None:
    found = client.get("/v1/storage").json()
    kept = {each["folder"]: each["kept"] for each in found["folders"]}
    assert kept["commits"] == "for ever" and "newest" in kept["batches"]
    assert found["disk_bytes"] is None, "the store's folder is not known"
    assert found["bytes"] == sum(each["bytes"] for each in found["folders"]) > 0


def test_what_would_change_a_run_that_is_over_is_refused(client: TestClient) -> None:
    answer = client.post("/v1/run/pause")
    assert answer.status_code == 409 and "--resume" in answer.json()["detail"]


def test_every_model_has_an_example_that_it_accepts_and_describes_each_field() -> None:
    found = [each for each in vars(models).values() if isinstance(each, type)]
    own = [each for each in found if each.__module__ == models.__name__]
    assert len(own) >= 7
    for model in own:
        schema = model.model_json_schema()  # type: ignore[attr-defined]
        [example] = schema["examples"]
        assert set(example) == set(schema["properties"]), model
        model.model_validate(example)  # type: ignore[attr-defined]
        assert all(each.get("description") for each in schema["properties"].values()), model
