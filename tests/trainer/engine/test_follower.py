"""What the first rank tells another one, and is answered: without the network in between."""

from dataclasses import replace

import pytest
import torch

from services.trainer.engine.follower import Follower, Message
from services.trainer.engine.other_ranks import FollowingRank
from services.trainer.engine.trainer_engine import TrainerEngine
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice
from shared.errors import ContractError
from shared.recipe.recipe import Recipe
from shared.store import StoreSettings, open_store
from tests.trainer.engine.ranked_program import groups_of

NO_OBJECTS = open_store(StoreSettings(url="file:///nowhere"))
HALVES = (GroupSlice(range(2)), GroupSlice(range(2, 4)))


class Direct:
    """A link to a follower in the same process."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._answer = Message("nothing")
        self.num_bytes: list[int] = []
        """Size of each message."""

    def send(self, message: Message) -> None:
        self.num_bytes.append(sum(map(len, message.blobs)))
        self._answer = self._follower.answer(message)

    def receive(self) -> Message:
        return self._answer


def linked(recipe: Recipe) -> tuple[FollowingRank, TrainerEngine, Direct]:
    engine = TrainerEngine(recipe)
    engine.begin()
    link = Direct(Follower(engine, recipe.run.name, NO_OBJECTS))
    return FollowingRank(link, engine), engine, link  # type: ignore[arg-type]


def test_a_group_in_pieces_is_sent_once_and_gives_the_gradient_of_the_whole(recipe: Recipe) -> None:
    rank, engine, link = linked(recipe)
    groups = groups_of(recipe)
    for cut in HALVES:
        for group in groups[:2]:
            rank.train(group, cut)
    assert [size > 0 for size in link.num_bytes] == [True, True, False, False]
    found = engine.gradient()
    engine.begin()
    for group in groups[:2]:
        engine.train(engine.read(group))
    for name, tensor in engine.gradient().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-9)


def test_every_piece_of_a_group_that_is_none_is_refused_and_the_next_group_is_trained(
    recipe: Recipe,
) -> None:
    rank, engine, _ = linked(recipe)
    before, good, after = groups_of(recipe)
    broken: GroupData = replace(good, trajectories=(b"broken", *good.trajectories[1:]))
    rank.train(before, HALVES[0])
    for cut in HALVES:
        with pytest.raises(ContractError, match="safetensors"):
            rank.train(broken, cut)
    rank.train(before, HALVES[1])
    for cut in HALVES:
        rank.train(after, cut)
    assert engine.tally["num_rows"] == 2 * 4 * recipe.sampling.window
