"""A store that does not answer for a while: a reward worker waits for it, and does not end."""

from collections.abc import Sized

import numpy as np
import pytest
import safetensors.numpy

from services.reward.app import RewardApp
from services.reward.scorer import WeightedScorer
from shared.bus.streams import as_unavailable
from shared.errors import Unavailable
from shared.messages.contracts import ObjectRef
from shared.process import worker as process_worker
from shared.process.worker import Worker, WorkerContext
from shared.store import ObjectStore
from tests import examples


class Away(ObjectStore):
    times = 2

    async def get(self, ref: ObjectRef) -> bytes:
        if type(self).times:
            type(self).times -= 1
            raise Unavailable("it is being started")
        return await ObjectStore.get(self, ref)


class Half:
    def score(self, images: Sized, metadata: object, /) -> list[float]:
        return [0.5] * len(images)


async def test_a_reward_worker_waits_for_its_store(
    folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_worker, "RETRY_S", 0.0)
    images = safetensors.numpy.save({"images": np.zeros((2, 1, 8, 8), np.uint8)})
    media = await folder_store.put("test", images, suffix=".safetensors")
    event = examples.generated(examples.task())
    event = event.model_copy(update={"stored": event.stored.model_copy(update={"media": media})})
    worker = Worker("reward", "reward", "waiting_for_rollout")
    context = WorkerContext(None, Away(folder_store.backend), worker)  # type: ignore[arg-type]
    app = RewardApp([WeightedScorer("half", 1.0, Half())], context)
    scored = await app._score(event)
    assert scored.rewards == (0.5, 0.5) and Away.times == 0


@pytest.mark.parametrize("code", [500, 503])
def test_what_is_the_brokers_fault_is_waited_for(code: int) -> None:
    from nats.js.errors import APIError

    with pytest.raises(Unavailable, match="no space left"), as_unavailable():
        raise APIError(code=code, err_code=10051, description="no space left on device")
    with pytest.raises(APIError), as_unavailable():
        raise APIError(code=400, err_code=10052, description="bad request")
