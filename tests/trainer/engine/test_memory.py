"""A trainer whose device runs out of memory tries smaller passes, and then says why it cannot."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.trainer.engine.threads import ReplicatedTraining
from shared.diffusion.models import Conditions
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.messages.contracts import RunFailed
from shared.recipe.recipe import Recipe, override
from tests.trainer.batches import make_batch
from tests.trainer.cluster import Cluster, cluster

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def loaded(recipe: Recipe) -> LoadedPolicy:
    return load_policy(recipe, {"transformer", "text", "decoder"})


@pytest.fixture
def rows(loaded: LoadedPolicy, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of rows of the passes that were tried; four fit."""
    whole, tried = loaded.model.velocity, []

    def velocity(x: Tensor, sigma: Tensor, told: Conditions, *, guidance: float) -> Tensor:
        if torch.is_grad_enabled():
            tried.append(len(x))
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return whole(x, sigma, told, guidance=guidance)

    monkeypatch.setattr(loaded.model, "velocity", velocity)
    yield tried


async def send_batch(run: Cluster, recipe: Recipe, loaded: LoadedPolicy) -> None:
    for number, group in enumerate(make_batch(recipe, loaded=loaded)):
        await run.send(
            0, number, advantages=group.advantages, parts=group.cut([2, 2]),
            conditions=group.conditions,
        )  # fmt: skip


async def test_a_pass_that_does_not_fit_is_not_tried_again_and_the_batch_is_trained_whole(
    nats_url: str, tmp_path: Path, recipe: Recipe, loaded: LoadedPolicy, rows: list[int]
) -> None:
    recipe = override(recipe, {"trainer.micro_batch": "auto", "schedule.tsp_steps": "auto"})
    training = ReplicatedTraining(recipe, [loaded])
    tuned = training._first._tuned
    candidates = [chunk for chunk in tuned._tuner.candidates if chunk.rows >= 3]
    tuned._tuner = type(tuned._tuner)(candidates=tuple(candidates), budget_bytes=1e12)
    async with cluster(nats_url, tmp_path / "objects", recipe, training=training) as run:
        await send_batch(run, recipe, loaded)
        record = await run.commit(1)
        assert await run.all_told(RunFailed) == 0
    assert [group.group for group in record.trained] == [0, 1, 2]
    assert record.metrics["onpolicy_ratio_error"] <= 1e-6
    assert record.metrics["zero_advantage_fraction"] == 0
    assert rows.count(6) == 1, "the pass of six rows"
    assert rows[-1] <= 4


async def test_passes_that_the_recipe_fixes_and_that_do_not_fit_fail_the_run_with_the_remedy(
    nats_url: str, tmp_path: Path, recipe: Recipe, loaded: LoadedPolicy, rows: list[int]
) -> None:
    training = ReplicatedTraining(recipe, [loaded])
    async with cluster(nats_url, tmp_path / "objects", recipe, training=training) as run:
        await send_batch(run, recipe, loaded)
        [failed] = await run.told(RunFailed)
    assert "training 2 samples x 3 steps in one pass" in failed.reason
    assert "Tried to allocate 20.00 GiB" in failed.reason
    assert "trainer.micro_batch" in failed.reason
    assert 2 <= len(rows) <= 4, "once more, in case that another process gives its memory back"
