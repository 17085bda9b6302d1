"""The emulated weights are an account of what was trained: planted bugs change it or end the run.

A batch is trained in one process with emulated devices, once as it should be, and once with a bug.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import safetensors.numpy

from bench.cluster.blobs import EmulatedWeights, media_blob, samples_of, trajectory_blob
from bench.cluster.build import Emulation, training
from bench.cluster.scoring import EmulatedScorer
from bench.cluster.setting import Setting
from shared.devices.protocols import GroupData
from shared.devices.slices import GroupSlice, slice_group
from shared.errors import ContractError
from shared.learning.advantages import group_advantages
from shared.messages.contracts import Fragment, GenerateFragment, Policy, Prompt
from shared.recipe.schedule import RunSchedule
from tests.profile.tiny import tiny_profile
from tests.stored import Given, one_object, read_back

GROUPS, SIZE, STEPS = 4, 4, 2
WINDOW, MEDIA = 256, 256
FIRST = EmulatedWeights.first(0).digest


@pytest.fixture
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    profile = str(tiny_profile(tmp_path_factory.mktemp("profile")))
    setting = Setting(
        run="ledger", profile=profile, rollout={"H100": 1}, trainer={"H100": 2}, scale=1e6,
        steps=2, schedule=RunSchedule(tag="off"),
    )  # fmt: skip
    return Emulation.of(setting)


def generated(
    group: int, *, weights: str = FIRST, attempt: int = 0, fragments: Sequence[int] = (SIZE,)
) -> GroupData:
    """Return a group in fragments of these sizes, and the rewards of the emulated scorer."""
    trajectories, rewards, first = [], [], 0
    for number in fragments:
        task = GenerateFragment(
            fragment=Fragment(
                batch=0, group=group, first_sample=first, num_samples=number, attempt=attempt
            ),
            policy=Policy(version=0, weights_digest=weights),
            prompt=Prompt(text=f"prompt {group}"),
            window_start=0,
            worker=f"device-{number}",
        )
        samples = samples_of(task, weights)
        trajectories.append(trajectory_blob(samples, WINDOW))
        images = safetensors.numpy.load(media_blob(samples, MEDIA))["images"]
        rewards += EmulatedScorer().score(images, [{}] * number)
        first += number
    return GroupData(
        trajectories=tuple(trajectories), conditions=b"", advantages=group_advantages(rewards)
    )


@dataclass
class Batch:
    """What a trainer does with a batch."""

    groups: list[GroupData] = field(default_factory=lambda: list(map(generated, range(GROUPS))))
    pieces: list[tuple[int, GroupSlice]] = field(
        default_factory=lambda: [(group, GroupSlice(range(SIZE))) for group in range(GROUPS)]
    )
    """(group, cut), in this order, on the devices in turn."""

    async def trained(self, emulation: Emulation) -> str:
        engine = training(emulation)
        engine.begin()
        for number, (group, cut) in enumerate(self.pieces):
            await engine.devices[number % 2].accumulate(self.groups[group], cut)
        await engine.step(0)
        return engine.weights_digest()


def with_samples(data: GroupData, change: Callable[[list[bytes]], None]) -> GroupData:
    joined = b"".join(data.trajectories)
    rows = [joined[at : at + WINDOW] for at in range(0, len(joined), WINDOW)]
    change(rows)
    return replace(data, trajectories=(b"".join(rows),))


def swap(rows: list[bytes]) -> None:
    rows[1], rows[2] = rows[2], rows[1]


async def test_whoever_trains_a_batch_and_in_whatever_pieces_the_weights_are_the_same(
    emulation: Emulation,
) -> None:
    plain = await Batch().trained(emulation)
    fine = [(g, cut) for g in (3, 1, 0, 2) for cut in slice_group(SIZE, 2, STEPS, is_last=g != 1)]
    assert await Batch(pieces=fine[::-1]).trained(emulation) == plain
    again = [generated(group, attempt=1, fragments=(1, 3)) for group in range(GROUPS)]
    assert await Batch(groups=again).trained(emulation) == plain
    assert plain != FIRST


@pytest.mark.parametrize("bug", ["bytes", "rewards", "version", "prompt", "step"])
async def test_a_sample_that_is_not_the_one_meant_makes_other_weights(
    bug: str, emulation: Emulation
) -> None:
    batch, data = Batch(), generated(2)
    adv = data.advantages
    wrong = {
        "bytes": with_samples(data, lambda rows: rows.__setitem__(1, rows[1][:-1] + b"\0")),
        "rewards": replace(data, advantages=(adv[0], adv[2], adv[1], adv[3])),
        "version": generated(2, weights=EmulatedWeights.first(1).digest),
        "prompt": with_samples(data, lambda rows: rows.__setitem__(0, rows[0][:40] + rows[1][40:])),
        "step": data,
    }
    batch.groups[2] = wrong[bug]
    if bug == "step":
        with pytest.raises(RuntimeError, match="batch 0: the steps"):
            await Batch(pieces=[*batch.pieces[1:], (0, GroupSlice(range(SIZE), 0, 2))]).trained(
                emulation
            )
    else:
        assert await batch.trained(emulation) != await Batch().trained(emulation)


async def test_two_samples_whose_bytes_are_exchanged_make_other_weights(
    emulation: Emulation,
) -> None:
    batch = Batch()
    batch.groups[0] = with_samples(batch.groups[0], swap)
    assert await batch.trained(emulation) != await Batch().trained(emulation)


async def test_a_sample_that_is_left_out_ends_the_run(emulation: Emulation) -> None:
    pieces = [*Batch().pieces[:3], (3, GroupSlice(range(3)))]
    with pytest.raises(RuntimeError, match="3 samples of group 3"):
        await Batch(pieces=pieces).trained(emulation)


async def test_a_sample_left_out_in_place_of_one_that_is_added_twice_ends_the_run(
    emulation: Emulation,
) -> None:
    """The number of samples is right, so counting them finds nothing."""
    left_out = [*Batch().pieces[:3], (3, GroupSlice(range(3))), (0, GroupSlice(range(1)))]
    with pytest.raises(RuntimeError, match="batch 0"):
        await Batch(pieces=left_out).trained(emulation)
    pieces = [*Batch().pieces[:3], (2, GroupSlice(range(SIZE)))]
    with pytest.raises(RuntimeError, match="batch 0"):
        await Batch(pieces=pieces).trained(emulation)


async def test_a_group_without_advantage_counts_as_skipped(
    emulation: Emulation,
) -> None:
    flat = replace(generated(2), advantages=(0.0,) * SIZE)
    groups = [generated(0), generated(1), flat, generated(3)]
    trained = await Batch(groups=groups).trained(emulation)
    engine = training(emulation)
    engine.begin()
    engine.skip(SIZE)
    for group in (0, 1, 3):
        await engine.devices[0].accumulate(groups[group], GroupSlice(range(SIZE)))
    await engine.step(0)
    assert engine.weights_digest() == trained


async def test_every_batch_is_in_all_later_weights(emulation: Emulation) -> None:
    """The same samples, trained from other weights, make other weights."""
    one, other = training(emulation), training(emulation)
    await other.restore(*_stored(EmulatedWeights.first(1)))
    for engine in (one, other):
        engine.begin()
        for group in range(GROUPS):
            await engine.devices[0].accumulate(generated(group), GroupSlice(range(SIZE)))
        await engine.step(0)
    assert one.weights_digest() != other.weights_digest()
    mine = await (await one.copy(states=True))()
    with pytest.raises(ContractError, match="checkpoint"):
        await one.restore(_stored(EmulatedWeights.first(1))[0], read_back(mine.checkpoint))


def _stored(weights: EmulatedWeights) -> tuple[Given, Given]:
    """Weights that also generate, and their checkpoint."""
    digest = weights.digest.encode()
    return one_object(digest), one_object(digest + digest)


async def test_what_generates_follows_all_that_was_trained_and_is_stored_with_it(
    emulation: Emulation,
) -> None:
    """It changes once per batch, also with two optimizer steps per batch."""
    changes = {"nft_decay": 1, "updates": 2}
    setting = emulation.setting.model_copy(update=changes)
    engine = training(replace(emulation, setting=setting))
    first, half = engine.sampling_digest(), GROUPS // 2
    assert first == engine.weights_digest()
    engine.begin()
    for part in (range(half), range(half, GROUPS)):
        assert engine.sampling_digest() == first
        for group in part:
            await engine.devices[0].accumulate(generated(group), GroupSlice(range(SIZE)))
        await engine.step(0)
    saved = await (await engine.copy(states=True))()
    assert saved.sampling is not None
    digests = (saved.digest, saved.sampling.digest)
    assert len({first, *digests}) == 3
    assert digests == (engine.weights_digest(), engine.sampling_digest())
    resumed = training(replace(emulation, setting=setting))
    await resumed.restore(read_back(saved.weights), read_back(saved.checkpoint))
    assert (resumed.weights_digest(), resumed.sampling_digest()) == digests
