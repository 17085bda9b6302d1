"""A rollout worker whose device runs out of memory goes on, and says of the fragment why."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.rollout.rollout_engine import RolloutEngine
from shared.diffusion.loading.models import Conditions
from shared.diffusion.sampling.tensors import unpack
from shared.diffusion.weights.trained_weights import weights_digest
from shared.messages.contracts import FragmentFailed, FragmentGenerated, Policy
from shared.run.commits import commit
from tests import examples
from tests.rollout.worker import RUN, cluster
from tests.shared.diffusion.digits import RECIPE, adapter, load_digits

pytestmark = pytest.mark.broker


async def test_memory_that_is_short_at_some_step_fails_the_fragment_and_not_the_worker(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = RolloutEngine(RECIPE)
    model, calls = engine._generator._model, [0]
    whole = model.velocity

    def velocity(x: Tensor, sigma: Tensor, told: Conditions, *, guidance: float) -> Tensor:
        calls[0] += 1
        if 3 < calls[0] < 7:  # with both samples, with one, and with one again
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return whole(x, sigma, told, guidance=guidance)

    monkeypatch.setattr(model, "velocity", velocity)
    weights = adapter(load_digits(), 1)
    policy = Policy(version=1, weights_digest=weights_digest(unpack(weights)))
    async with cluster(nats_url, tmp_path / "objects", device=engine) as run:
        ref = await run.store.put(f"{RUN}/weights", weights, suffix=".safetensors")
        record = examples.record(
            1, run=RUN, policy=policy, parent=run.parent, weights=ref, checkpoint=ref
        )
        await commit(run.store, record)
        await run.bus.publish(examples.published(1, policy=policy, weights=ref))
        for group in (0, 1):
            await run.bus.publish(examples.task(batch=1, group=group, policy=policy))
        [failed] = await run.told("fragment_failed")
        assert isinstance(failed, FragmentFailed)
        assert failed.stage == "rollout" and failed.slot.group == 0
        assert "Tried to allocate 20.00 GiB" in failed.reason
        assert "fragment of 2" in failed.reason and "model.height" in failed.reason
        [made] = await run.told("fragment_generated")
        assert isinstance(made, FragmentGenerated) and made.fragment.group == 1
