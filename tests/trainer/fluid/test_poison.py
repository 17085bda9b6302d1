"""Stored objects that cannot be trained fail their fragment or group, and never the member."""

import asyncio
import contextlib
from dataclasses import replace
from typing import TypeVar

import pytest
import torch

from services.trainer import limits
from shared.diffusion.sampling.tensors import pack
from shared.messages import subjects
from shared.messages.contracts import FragmentFailed, GroupFailed
from shared.messages.fluid import PieceReleased
from tests.trainer.fluid.director import WAIT_S, Director, whole

pytestmark = pytest.mark.broker
E = TypeVar("E", FragmentFailed, GroupFailed)


async def told(director: Director, kind: type[E]) -> E:
    """Return the first event of a kind."""
    async with (
        asyncio.timeout(WAIT_S),
        contextlib.aclosing(director.bus.follow(subjects.EVT)) as events,
    ):
        async for received in events:
            if isinstance(received.message, kind):
                return received.message
    raise AssertionError


async def test_a_poisoned_fragment_and_a_group_that_the_network_cannot_take_are_made_anew(
    director: Director,
) -> None:
    flat = pack({name: torch.zeros(5) for name in ("latents", "log_probs", "sigmas")} | {
        "step_indices": torch.tensor(0)
    })  # fmt: skip
    narrow = pack({"text": torch.zeros(1, 3, 5), "pooled": torch.zeros(1, 7)})
    await director.start("a")
    _, second, third = await director.open(0, by="a")
    policy = await director.policy(0)
    poisoned = replace(second, trajectories=(second.trajectories[0], flat))
    await director.send(0, 1, poisoned, policy, attempt=1)
    await director.send(0, 2, replace(third, conditions=narrow), policy, attempt=1)
    faulty = [whole(director.recipe, number, attempt=1) for number in (1, 2)]
    await director.give(0, {"a": faulty})
    released = await director.told(PieceReleased, 2)
    assert sorted(each.reason for each in released) == ["failed", "faulty"]
    refused = await told(director, FragmentFailed)
    slot = refused.slot
    assert (refused.stage, slot.group, slot.first_sample) == ("admission", 1, 2)
    assert "do not fit each other" in refused.reason
    failed = await told(director, GroupFailed)
    assert failed.group == 2 and "the network cannot take these tensors" in failed.reason
    parts = {"a": [whole(director.recipe, number) for number in range(3)]}
    await director.train(0, parts, sum_number=1)
    shares = director.shares(parts, sum_number=1)
    message = await director.exchange(0, shares, committer="a")
    await director.step(message, 1)
    record = await director.record(1)
    assert record.metrics["zero_advantage_fraction"] == 0, "each row was counted once"


async def test_a_piece_whose_group_has_no_message_goes_back(
    director: Director, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GROUP_TIMEOUT_S", 0.2)
    await director.start("a")
    await director.open(0, by="a")
    await director.give(0, {"a": [whole(director.recipe, 0, attempt=1)]})
    [released] = await director.told(PieceReleased, 1)
    assert released.reason == "faulty"
