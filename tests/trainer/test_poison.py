"""Stored objects that cannot be trained fail their fragment or group, and never the trainer."""

from functools import partial
from pathlib import Path

import pytest
import torch

from services.trainer.engine.threads import ReplicatedTraining
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.tensors import pack
from shared.diffusion.training.rows import check_stored
from shared.messages.contracts import FragmentFailed, GroupFailed
from shared.recipe.recipe import Recipe
from tests.trainer.batches import make_batch
from tests.trainer.cluster import cluster

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def loaded(recipe: Recipe) -> LoadedPolicy:
    return load_policy(recipe, {"transformer", "text", "decoder"})


async def test_a_poisoned_fragment_and_a_group_that_the_network_cannot_take_are_made_anew(
    nats_url: str, tmp_path: Path, recipe: Recipe, loaded: LoadedPolicy
) -> None:
    first, second, third = make_batch(recipe, loaded=loaded)
    flat = pack({name: torch.zeros(5) for name in ("latents", "log_probs", "sigmas")} | {
        "step_indices": torch.tensor(0)
    })  # fmt: skip
    narrow = pack({"text": torch.zeros(1, 3, 5), "pooled": torch.zeros(1, 7)})
    training = ReplicatedTraining(recipe, [loaded])
    check = partial(check_stored, recipe)
    async with cluster(
        nats_url, tmp_path / "objects", recipe, training=training, check=check
    ) as run:

        async def send(number: int, group: object, **what: object) -> None:
            assert isinstance(group, type(first))
            given = {
                "advantages": group.advantages,
                "parts": group.cut([2, 2]),
                "conditions": group.conditions,
            }
            await run.send(0, number, **{**given, **what})  # type: ignore[arg-type]

        await send(0, first)
        await send(1, second, parts=[second.cut([2, 2])[0], flat])
        await send(2, third, conditions=narrow)
        [refused] = await run.told(FragmentFailed)
        assert (refused.stage, refused.slot.group, refused.slot.first_sample) == ("admission", 1, 2)
        assert "do not fit each other" in refused.reason
        [failed] = await run.told(GroupFailed)
        assert failed.group == 2 and "the network cannot take these tensors" in failed.reason
        await send(1, second, attempt=1)
        await send(2, third, attempt=1)
        record = await run.commit(1)
        assert [group.attempt for group in record.trained] == [0, 1, 1]
        assert await run.all_told(GroupFailed) == 1
    assert record.metrics["zero_advantage_fraction"] == 0, "each row was counted once"
