"""Samples of a caller's own prompt, as `digenrl generate` makes them of a stored run."""

import asyncio
import os
from pathlib import Path
from typing import cast

import httpx
import pytest
from fastapi.testclient import TestClient

from digenrl.api.client import Client, Refused
from digenrl.api.run_history import RunHistory
from digenrl.api.run_routes import shown_routes
from digenrl.api.sample_now import SampleNow, sample_routes
from shared.process.http_access import Access
from shared.process.http_guard import Guard, own_names
from shared.store import ObjectStore
from tests.api.served import app_of
from tests.evaluation.runs import begin, commit_up_to
from tests.follow.runs import RUN
from tests.view.stored import stored_run

pytestmark = pytest.mark.filterwarnings("ignore:You should not use the 'timeout' argument")


def client_of(store: ObjectStore, run: str, objects: Path) -> Client:
    environment = {**os.environ, "DIGENRL_STORE_URL": f"file://{objects}"}
    sampling = SampleNow(RunHistory(store, run), environment)
    routes = sample_routes(sampling)
    routes.include_router(shown_routes(sampling.history))
    guard = Guard(app_of(routes), own_names("testserver"), access=Access(is_open=True))
    return Client(cast(httpx.Client, TestClient(guard)))


@pytest.mark.slow
def test_two_versions_sample_a_prompt_from_the_same_noise(
    folder_store: ObjectStore, tmp_path: Path
) -> None:
    async def commit() -> str:
        recipe = await begin(folder_store)
        await commit_up_to(folder_store, recipe, 2)
        return recipe.run.name

    client = client_of(folder_store, asyncio.run(commit()), tmp_path / "objects")
    samples = client.sample_prompt("a handwritten three", [0, 2], seed=5, num_each=2)
    assert [each.version for each in samples] == [0, 0, 2, 2]
    assert all(each.reward is not None and 0 <= each.reward <= 1 for each in samples)
    [unknown] = client.sample_prompt("a red car", [2])
    assert unknown.reward is None and "a digit scorer needs metadata" in unknown.why_unscored
    pictures = [client.get_media(each.media.rpartition("/")[2]) for each in samples]
    assert all(each.startswith(b"\x89PNG") for each in pictures) and len(set(pictures)) == 4
    assert client.sample_prompt("a handwritten three", [0, 2], seed=5, num_each=2) == samples


def test_what_cannot_be_sampled_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    run = stored_run(tmp_path, timelines=False)
    client = client_of(run.store, RUN, tmp_path / "objects")

    def refusal(prompt: str, *versions: int) -> tuple[int, str]:
        with pytest.raises(Refused) as found:
            client.sample_prompt(prompt, [*versions])
        return found.value.status, str(found.value)

    assert refusal("a handwritten three", 9) == (404, "version: the newest version is 4")
    wrong = ((" ", (1,)), ("x" * 5000, (1,)), ("a\0b", (1,)), ("three", ()), ("three", (0, 1, 2)))
    for prompt, versions in wrong:
        assert refusal(prompt, *versions)[0] == 422
