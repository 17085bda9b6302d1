"""What a run's messages may take of each stream, from its recipe."""

from typing import Any

import pytest

from services.scheduler.shell.service import stream_needs
from shared.limits import MAX_FRAGMENTS_PER_GROUP
from shared.messages import subjects, volume
from shared.messages.codec import encode
from shared.messages.contracts import (
    Fragment,
    FragmentGenerated,
    FragmentScored,
    GenerateFragment,
    Message,
    ObjectRef,
    Policy,
    Prompt,
    Trajectories,
)
from shared.messages.fluid import Piece, PieceTrained, Stepped, SumHeld, TrainPiece
from shared.messages.subjects import FLUID, REW, TASK, TRAJ, find_stream, message_subject
from shared.messages.volume import ATTEMPTS, BATCHES_AT_ONCE, BatchVolume, prompt_bytes
from tests import examples

NAME, DIGEST, NUMBER = "n" * 64, "f" * 64, 10**6
BESIDE = 64
"""Bytes that the broker stores beside a message and its subject."""
FRAGMENT = Fragment(batch=NUMBER, group=4096, first_sample=1008, num_samples=16, attempt=99)
POLICY = Policy(version=NUMBER, weights_digest=DIGEST)
PROMPT = Prompt(text="a prompt", metadata={"class": "cat"})
REF = ObjectRef(key=f"{NAME}/batches/{NUMBER:06d}/{NAME}", sha256=DIGEST, size=2**40)
STORED = Trajectories(trajectory=REF, conditions=REF, media=REF, weights_digest=DIGEST)
WEIGHTS = ObjectRef(key=f"{NAME}/weights/{DIGEST}.manifest.json", sha256=DIGEST, size=2**40)
SCORES = tuple(number / 7 for number in range(16))
MESSAGES: tuple[Message, ...] = (
    GenerateFragment(
        fragment=FRAGMENT, policy=POLICY, prompt=PROMPT, window_start=50, worker=NAME,
        weights=WEIGHTS,
    ),
    FragmentGenerated(
        fragment=FRAGMENT, policy=POLICY, prompt=PROMPT, stored=STORED, worker=NAME, seconds=1 / 7
    ),
    FragmentScored(
        fragment=FRAGMENT, policy=POLICY, stored=STORED, rewards=SCORES, parts={NAME: SCORES},
        generated_by=NAME, worker=NAME, seconds=1 / 7,
    ),
)  # fmt: skip
"""One of each kind with the longest names, of a batch of one group."""


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_message_with_the_longest_names_fits_what_is_counted_for_it(message: Message) -> None:
    subject = message_subject(NAME, message)
    one = BatchVolume(
        groups=1, group_size=16, fragments_per_group=1, scorers=1,
        prompt_bytes=prompt_bytes([PROMPT], 1),
    ).needs()  # fmt: skip
    stream = find_stream(subject)
    assert stream in (TASK, TRAJ, REW)
    counted = one[stream.name] / BATCHES_AT_ONCE / ATTEMPTS
    assert len(encode(message)) + len(subject) + BESIDE <= counted


def stored_bytes(*messages: Message) -> int:
    return sum(len(encode(each)) + len(message_subject(NAME, each)) + BESIDE for each in messages)


def test_what_fluid_devices_say_with_the_longest_names_fits_what_is_counted_for_it() -> None:
    piece = Piece(
        group=4096, attempt=99, number=9999, first_sample=1000, num_samples=1000, first_step=500,
        num_steps=500,
    )  # fmt: skip
    of_batch: dict[str, Any] = {"batch": NUMBER, "attempt": 7, "worker": NAME}
    of_piece = {**of_batch, "piece": piece, "sum_number": NUMBER}
    given = TrainPiece(**of_piece, policy=POLICY)
    trained = PieceTrained(**of_piece, seconds=1 / 7, pass_rows=NUMBER)
    assert stored_bytes(given, trained) <= volume.PIECE_BYTES
    held = SumHeld(
        **of_batch, round=99, sum_id=DIGEST, norm=1 / 7, finite=True, scale=1 / 7, seconds=1 / 7
    )
    stepped = Stepped(**of_batch, policy=POLICY, checksum="f" * 32, seconds=1 / 7)
    assert stored_bytes(held, stepped) <= volume.STEP_BYTES


@pytest.mark.parametrize(("groups", "streams"), [(32, 1), (4096, 3)])
def test_a_batch_has_the_room_that_all_its_pieces_need(groups: int, streams: int) -> None:
    plan = examples.plan(num_groups=groups, group_size=16, fragment_size=4)
    need = stream_needs(plan)[FLUID.name]
    assert (streams - 1) * FLUID.max_bytes < need <= streams * FLUID.max_bytes


def test_needs_grow_with_the_batch_and_with_small_fragments() -> None:
    small = stream_needs(examples.plan(num_groups=32, group_size=16, fragment_size=4))
    large = stream_needs(examples.plan(num_groups=2560, group_size=16, fragment_size=4))
    free = stream_needs(examples.plan(num_groups=32, group_size=16, fragment_size="auto"))
    of_groups = small.keys() - {FLUID.name}  # a batch has so many pieces at most
    assert all(80 * small[name] <= large[name] + 80 for name in of_groups)
    assert all(small[name] <= free[name] for name in small)
    assert all(need < subjects.TASK.max_bytes for need in small.values())
    assert any(need > subjects.TASK.max_bytes for need in large.values()), "of 2,048 devices"
    groups = stream_needs(examples.plan(num_groups=1, group_size=1024, fragment_size="auto"))
    each = (volume.TASK_BYTES + prompt_bytes(examples.PROMPTS, 1)) * BATCHES_AT_ONCE * ATTEMPTS
    assert groups[TASK.name] == int(MAX_FRAGMENTS_PER_GROUP * each)


def test_the_longest_prompts_that_a_batch_could_have_are_counted() -> None:
    prompts = [Prompt(text="x" * length) for length in (1000, 10, 500, 20)]
    assert prompt_bytes(prompts, 2) == 750 + 16
    assert prompt_bytes(prompts, 9) == -(-1530 // 4) + 16
    assert prompt_bytes([], 2) == 0
