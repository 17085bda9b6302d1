"""The update does not depend on where gradients are computed, or whether zeros are."""

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.trainer.engine.threads import ReplicatedTraining
from shared.devices.protocols import GroupData, Training
from shared.devices.slices import GroupSlice
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.tensors import pack, unpack
from shared.diffusion.training.tally import Tally
from shared.diffusion.weights import load_weights, trained_tensors
from shared.errors import BatchFailed
from shared.recipe.recipe import Recipe, override
from tests.stored import as_bytes, packed, read_back
from tests.trainer.batches import make_batch

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
OFF_POLICY = 3e-3
SIZE = 4


def relative_error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Over all tensors as one vector."""
    assert found.keys() == wanted.keys()
    difference = sum(float(((found[n] - wanted[n]).double() ** 2).sum()) for n in wanted)
    return float((difference / sum(float((w.double() ** 2).sum()) for w in wanted.values())) ** 0.5)


@dataclass(frozen=True)
class Stepped:
    """What the first optimizer step leaves."""

    moments: dict[str, Tensor]
    """The clipped gradient, times a constant."""
    adapter: dict[str, Tensor]
    digest: str
    metrics: dict[str, float]


async def stepped(training: ReplicatedTraining, batch: int = 0) -> Stepped:
    metrics = await training.step(batch)
    weights = await training.weights()
    checkpoint = unpack(packed(weights.checkpoint))
    moments = {n: t for n, t in checkpoint.items() if n.startswith("exp_avg/")}
    return Stepped(moments, unpack(packed(weights.weights)), weights.digest, metrics)


async def train(training: Training, group: GroupData) -> None:
    """Whole, on the first device."""
    await training.devices[0].accumulate(group, GroupSlice(range(SIZE)))


async def split(training: Training, group: GroupData) -> None:
    """A sample and a part of another one's steps here, the rest there, side by side."""
    here, there = training.devices

    async def first() -> None:
        await here.accumulate(group, GroupSlice(range(1)))
        await here.accumulate(group, GroupSlice(range(1, 2), part=1, num_parts=2))

    async def second() -> None:
        await there.accumulate(group, GroupSlice(range(1, 2), part=0, num_parts=2))
        await there.accumulate(group, GroupSlice(range(2, SIZE)))

    await asyncio.gather(first(), second())


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    policies: tuple[LoadedPolicy, LoadedPolicy, LoadedPolicy]
    """Policies on two devices of a trainer, and on one that generated."""
    groups: tuple[GroupData, ...]
    """Off-policy; the last is stale."""
    wanted: Stepped
    """Result of one device."""

    def training(self, num_devices: int) -> ReplicatedTraining:
        """Begin a training with the weights that all began with."""
        fresh = ReplicatedTraining(self.recipe, self.policies[:num_devices])
        for policy in self.policies[:num_devices]:
            load_weights(policy.model.transformer, unpack(self.adapter))
        return fresh

    @property
    def adapter(self) -> bytes:
        return pack(trained_tensors(self.policies[2].model.transformer))


def data(recipe: Recipe, loaded: LoadedPolicy) -> tuple[GroupData, ...]:
    batch = make_batch(recipe, off_policy=OFF_POLICY, loaded=loaded)
    return tuple(
        GroupData(
            trajectories=tuple(group.cut((2, 2))),
            conditions=group.conditions,
            advantages=tuple(group.advantages),
            staleness=int(number == 2),
        )
        for number, group in enumerate(batch)
    )


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "float64"])
def case(request: pytest.FixtureRequest, recipe: Recipe) -> Case:
    recipe = override(recipe, {"model.dtype": request.param})
    generating = load_policy(recipe, {"transformer", "text", "decoder"})
    first, second = (load_policy(recipe, {"transformer"}) for _ in range(2))
    policies = (first, second, generating)
    groups = data(recipe, generating)

    async def by_one_device() -> Stepped:
        training = ReplicatedTraining(recipe, policies[:1])
        training.begin()
        for group in groups:
            await train(training, group)
        return await stepped(training)

    return Case(recipe, policies, groups, asyncio.run(by_one_device()))


@given(
    ways=st.lists(st.sampled_from(["train", "split"]), min_size=3, max_size=3),
    order=st.permutations(range(3)),
)
@settings(max_examples=4, deadline=None)
def test_wherever_gradients_are_computed_the_update_is_that_of_one_device(
    case: Case, ways: list[str], order: list[int]
) -> None:
    async def by_all() -> Stepped:
        training = case.training(2)
        training.begin()
        for number in order:
            way = train if ways[number] == "train" else split
            await way(training, case.groups[number])
        found = await stepped(training)
        for policy in case.policies[:2]:
            assert policy.in_use.digest() == found.digest, "the devices hold other weights"
        return found

    tolerance = TOLERANCE[case.recipe.model.dtype]
    found, wanted = asyncio.run(by_all()), case.wanted
    assert relative_error(found.moments, wanted.moments) <= tolerance
    assert relative_error(found.adapter, wanted.adapter) <= tolerance
    assert found.metrics == pytest.approx(wanted.metrics, rel=1e-4, abs=1e-6)


async def test_an_optimizer_is_restored_on_all_devices(case: Case) -> None:
    training = case.training(2)
    training.begin()
    await split(training, case.groups[0])
    await training.step(0)
    saved = await training.weights()
    training.begin()
    await split(training, case.groups[1])
    await training.step(1)
    await training.restore(read_back(saved.weights), read_back(saved.checkpoint))
    assert [policy.in_use.digest() for policy in case.policies[:2]] == [saved.digest] * 2
    assert as_bytes(await training.weights()) == as_bytes(saved)


def test_tallies_of_parts_add_up_to_that_of_all_rows() -> None:
    one = Tally(num_rows=3, ratio_sum=3.3, ratio_min=0.9, ratio_max=1.4, onpolicy_ratio_error=0.4)
    two = Tally(num_rows=5, ratio_sum=4.5, ratio_min=0.7, ratio_max=1.1, num_stale=5, loss=2.0)
    one.merge(two.as_dict())
    assert one == Tally(
        num_rows=8, ratio_sum=7.8, ratio_min=0.7, ratio_max=1.4,
        onpolicy_ratio_error=0.4, num_stale=5, loss=2.0,
    )  # fmt: skip


def test_the_effective_share_is_the_same_however_rows_are_tallied() -> None:
    """Two tallies have two weights of 1, 1, 1 and 3 each, which gives 6^2 / (4 x 12)."""
    one = Tally(num_rows=2, weight_sum=2.0, weight_square_sum=2.0)
    one.merge(Tally(num_rows=2, weight_sum=4.0, weight_square_sum=10.0).as_dict())
    assert one.effective_share == pytest.approx(0.75)
    one.skip(10)
    assert one.effective_share == pytest.approx(0.75), "rows without advantage have no weight"
    assert Tally().effective_share == 1


@pytest.mark.parametrize(("ratio", "fails"), [(0.4, True), (0.6, False), (1.9, False), (2.1, True)])
def test_ratios_that_are_all_too_far_from_one_fail_a_batch_whose_weights_are_equal(
    ratio: float, fails: bool
) -> None:
    weight = min(ratio, 2.0)
    tally = Tally(
        num_rows=8, ratio_sum=8 * ratio, weight_sum=8 * weight, weight_square_sum=8 * weight**2
    )
    with pytest.raises(BatchFailed, match=f"mean ratio is {ratio}") if fails else nullcontext():
        tally.check_weights(2.0)


def test_too_few_rows_that_count_fail_a_batch_whose_mean_ratio_is_well() -> None:
    """3 of 8 rows have the largest weight and the others none; 4 would do."""
    for counting, fails in ((3, True), (4, False)):
        sums = 2.0 * counting
        tally = Tally(num_rows=8, ratio_sum=sums, weight_sum=sums, weight_square_sum=4.0 * counting)
        with pytest.raises(BatchFailed, match="count as 38%") if fails else nullcontext():
            tally.check_weights(2.0)


@pytest.fixture(scope="module")
def without_kl(recipe: Recipe) -> Recipe:
    return override(recipe, {"algorithm.kl_beta": 0.0})


@pytest.mark.parametrize("num_zeros", [1, 3])
async def test_groups_without_advantage_that_are_not_trained_change_no_bit(
    case: Case, without_kl: Recipe, num_zeros: int
) -> None:
    """They come in the second batch, so that the optimizer has something to remember."""
    recipe = override(without_kl, {"model.dtype": case.recipe.model.dtype})

    async def second_step(skip: bool) -> Stepped:
        training = replace(case, recipe=recipe).training(1)
        training.begin()
        for group in case.groups:
            await train(training, group)
        await training.step(0)
        training.begin()
        for number, group in enumerate(case.groups):
            is_zero = number < num_zeros
            if skip and is_zero:
                training.skip(SIZE)
            else:
                advantages = (0.0,) * SIZE if is_zero else group.advantages
                await train(training, replace(group, advantages=advantages))
        return await stepped(training, 1)

    trained, skipped = await second_step(skip=False), await second_step(skip=True)
    for name, moment in trained.moments.items():
        assert torch.equal(skipped.moments[name], moment)
    for name, tensor in trained.adapter.items():
        assert torch.equal(skipped.adapter[name], tensor)
    said = ("loss", "grad_norm", "zero_advantage_fraction", "clip_fraction_low")
    assert {n: skipped.metrics[n] for n in said} == {n: trained.metrics[n] for n in said}
    assert skipped.metrics["zero_advantage_fraction"] == pytest.approx(num_zeros / 3)
    assert all(abs(value) < 10 for value in skipped.metrics.values())
