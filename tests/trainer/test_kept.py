"""What the trainer keeps of its own devices' trajectories: each once, within bounds."""

import hashlib

from services.trainer.kept import KeptTrajectories
from shared.contracts import ObjectRef


def stored(data: bytes) -> tuple[ObjectRef, bytes]:
    digest = hashlib.sha256(data).hexdigest()
    return ObjectRef(key=f"run/{digest}", sha256=digest, size=len(data)), data


def test_each_is_taken_once() -> None:
    kept = KeptTrajectories()
    ref, data = stored(b"states")
    kept.keep(ref, data)
    assert kept.take(ref) == data
    assert kept.take(ref) is None


def test_the_oldest_make_room() -> None:
    kept = KeptTrajectories(most_bytes=10)
    first, second, third = stored(b"11111"), stored(b"22222"), stored(b"333")
    for each in (first, second, third):
        kept.keep(*each)
    assert kept.take(first[0]) is None
    assert kept.take(second[0]) == second[1]
    assert kept.take(third[0]) == third[1]


def test_what_is_kept_again_counts_once() -> None:
    kept = KeptTrajectories(most_bytes=10)
    first, second = stored(b"11111"), stored(b"22222")
    for each in (first, second, first):
        kept.keep(*each)
    assert kept.take(first[0]) == first[1]
    assert kept.take(second[0]) == second[1]


def test_one_that_is_larger_than_all_room_is_not_kept() -> None:
    kept = KeptTrajectories(most_bytes=4)
    ref, data = stored(b"11111")
    kept.keep(ref, data)
    assert kept.take(ref) is None
