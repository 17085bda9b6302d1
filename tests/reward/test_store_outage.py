"""A store that does not answer for a while: a reward worker waits for it, and does not end."""

import pytest

from shared.bus.streams import as_unavailable
from shared.errors import Unavailable
from shared.messages.contracts import ObjectRef
from shared.process import worker as process_worker
from shared.store import ObjectStore
from tests.reward.on_bus import Works, app_of, generated


class Away(ObjectStore):
    times = 2

    async def get(self, ref: ObjectRef) -> bytes:
        if type(self).times:
            type(self).times -= 1
            raise Unavailable("it is being started")
        return await ObjectStore.get(self, ref)


async def test_a_reward_worker_waits_for_its_store(
    folder_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_worker, "WORKER_RETRY_S", 0.0)
    app = app_of(None, Away(folder_store.backend), Works())
    scored = await app._score(await generated(folder_store))
    assert scored.rewards == (0.5, 0.5) and Away.times == 0


@pytest.mark.parametrize("code", [500, 503])
def test_what_is_the_brokers_fault_is_waited_for(code: int) -> None:
    from nats.js.errors import APIError

    with pytest.raises(Unavailable, match="no space left"), as_unavailable():
        raise APIError(code=code, err_code=10051, description="no space left on device")
    with pytest.raises(APIError), as_unavailable():
        raise APIError(code=400, err_code=10052, description="bad request")
