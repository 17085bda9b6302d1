"""The emulated weights are an account of what was trained: planted bugs change it or end the run.

from tests import examples
A batch is added up once as it should be, and once with a bug.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import safetensors.numpy

from bench.cluster.accounts import Account, PieceEntries, total_of
from bench.cluster.blobs import EmulatedWeights, media_blob, samples_of, trajectory_blob
from bench.cluster.ledger import entries_of
from bench.cluster.scoring import EmulatedScorer
from services.scheduler.costs.shape import Shape
from shared.devices.protocols import GroupData
from shared.learning.advantages import group_advantages
from shared.messages.contracts import Policy, Prompt
from tests import examples

GROUPS, SIZE, STEPS = 4, 4, 2
WINDOW, MEDIA = 256, 256
FIRST = EmulatedWeights.first(0).digest


SHAPE = Shape(groups=GROUPS, group_size=SIZE, steps=4, trained_steps=STEPS, updates=1)
WHOLE = range(SIZE), range(STEPS)
Cut = tuple[int, range, range]
"""Group, samples, and trained steps of a piece."""


def generated(
    group: int, *, weights: str = FIRST, attempt: int = 0, fragments: Sequence[int] = (SIZE,)
) -> GroupData:
    """Return a group in fragments of these sizes, and the rewards of the emulated scorer."""
    trajectories, rewards, first = [], [], 0
    for number in fragments:
        task = examples.task(
            group=group, first_sample=first, num_samples=number, attempt=attempt,
            policy=Policy(version=0, weights_digest=weights), prompt=Prompt(text=f"prompt {group}"),
        )  # fmt: skip
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
    """What two members do with a batch."""

    groups: list[GroupData] = field(default_factory=lambda: list(map(generated, range(GROUPS))))
    pieces: list[Cut] = field(default_factory=lambda: [(group, *WHOLE) for group in range(GROUPS)])
    """In this order, on the members in turn."""
    skipped_rows: int = 0

    def trained(self, before: str = FIRST) -> str:
        members = {"a": Account(skipped_rows=self.skipped_rows), "b": Account()}
        for number, (group, samples, steps) in enumerate(self.pieces):
            entries = entries_of(self.groups[group], samples)
            members["ab"[number % 2]].pieces.append(PieceEntries(steps, tuple(entries)))
        return total_of(members, SHAPE, 0, before).after


def with_samples(data: GroupData, change: Callable[[list[bytes]], None]) -> GroupData:
    joined = b"".join(data.trajectories)
    rows = [joined[at : at + WINDOW] for at in range(0, len(joined), WINDOW)]
    change(rows)
    return replace(data, trajectories=(b"".join(rows),))


def swap(rows: list[bytes]) -> None:
    rows[1], rows[2] = rows[2], rows[1]


def test_whoever_trains_a_batch_and_in_whatever_pieces_the_weights_are_the_same() -> None:
    plain = Batch().trained()
    fine = [
        (group, range(sample, sample + 1), range(step, step + 1))
        for group in (3, 1, 0, 2) for sample in range(SIZE) for step in range(STEPS)
    ]  # fmt: skip
    assert Batch(pieces=fine[::-1]).trained() == plain
    again = [generated(group, attempt=1, fragments=(1, 3)) for group in range(GROUPS)]
    assert Batch(groups=again).trained() == plain
    assert plain != FIRST


@pytest.mark.parametrize("bug", ["bytes", "rewards", "version", "prompt", "order"])
def test_a_sample_that_is_not_the_one_meant_makes_other_weights(bug: str) -> None:
    batch, data = Batch(), generated(2)
    adv = data.advantages
    batch.groups[2] = {
        "bytes": with_samples(data, lambda rows: rows.__setitem__(1, rows[1][:-1] + b"\0")),
        "rewards": replace(data, advantages=(adv[0], adv[2], adv[1], adv[3])),
        "version": generated(2, weights=EmulatedWeights.first(1).digest),
        "prompt": with_samples(data, lambda rows: rows.__setitem__(0, rows[0][:40] + rows[1][40:])),
        "order": with_samples(data, swap),
    }[bug]
    assert batch.trained() != Batch().trained()


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ([(3, range(3), range(STEPS))], "3 samples of group 3"),
        ([], "batch 0 has"),
        ([(3, range(SIZE), range(1))], "batch 0: the steps"),
        # The number of samples is right, so counting them finds nothing.
        ([(3, range(3), range(STEPS)), (0, range(1), range(STEPS))], "batch 0"),
        ([(2, *WHOLE)], "batch 0"),
    ],
)
def test_what_is_left_out_or_added_twice_ends_the_run(last: list[Cut], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        Batch(pieces=[*Batch().pieces[:3], *last]).trained()


def test_a_group_without_advantage_counts_as_skipped() -> None:
    flat = replace(generated(2), advantages=(0.0,) * SIZE)
    groups = [generated(0), generated(1), flat, generated(3)]
    left = [each for each in Batch().pieces if each[0] != 2]
    skipped = Batch(groups=groups, pieces=left, skipped_rows=SIZE * STEPS)
    assert Batch(groups=groups).trained() == skipped.trained()


def test_every_batch_is_in_all_later_weights() -> None:
    """The same samples, trained from other weights, make other weights."""
    assert Batch().trained() != Batch().trained(EmulatedWeights.first(1).digest)
