"""Members that know more than the scheduler, or are told what is not true."""

import pytest

from services.trainer.fluid.exchange import WHOLE_BATCH
from shared.messages.fluid import BeginAgain
from tests import examples
from tests.trainer.fluid.director import Start, whole

pytestmark = pytest.mark.broker


async def test_a_group_is_read_again_at_another_attempt_of_the_batch(direct: Start) -> None:
    """A scheduler that knows nothing of the streams before has made another group of that name."""
    async with direct(batch__groups=1, algorithm__kl_beta=0.0) as director:
        parts = {"a": [whole(director.recipe, 0)]}
        await director.start("a")
        await director.open(0, by="a")
        await director.train(0, parts)
        await director.bus.forget_batch(0)
        await director.open(0, by="a", advantages=[0.0] * 4)
        await director.train(0, parts, attempt=1000)
        found = (await director.members["a"].device.own_sum())[WHOLE_BATCH].gradient
        assert found is None


async def test_who_has_a_version_that_nobody_knows_goes_back_when_the_batch_begins_again(
    direct: Start,
) -> None:
    async with direct(batch__groups=1) as director:
        parts = {"a": [whole(director.recipe, 0)]}
        await director.start("a", "b")
        await director.open(0, by="a")
        await director.train(0, parts)
        shares = [*director.shares(parts), *director.shares({"b": []})]
        message = await director.exchange(0, shares, committer="a")
        async with director.members["a"].lock:  # it cannot step, so nobody commits
            await director.held(message, 2)
            await director.take(message, (await director.held(message, 2))[0])
            worker = director.members["b"].worker
            await director.until(lambda: worker.holds and worker.holds.version == 1)
            await director.kill("a")
        await director.bus.publish(BeginAgain(batch=0, attempt=1000))
        await director.until(lambda: worker.holds and worker.holds.version == 0)


async def test_an_announcement_of_a_version_that_nobody_has_made_hides_none(direct: Start) -> None:
    async with direct(batch__groups=1) as director:
        await director.start("a", "b")
        await director.bus.publish(examples.published(9, weights=examples.ref("none")))
        await director.batch(0, {"a": [whole(director.recipe, 0)]}, committer="a")
        worker = director.members["b"].worker
        await director.until(lambda: worker.holds and worker.holds.version == 1)
