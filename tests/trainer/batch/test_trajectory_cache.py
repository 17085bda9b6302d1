"""What the trainer keeps of its own devices' trajectories: each once, within bounds."""

from services.trainer.batch.fetcher import TrajectoryCache
from tests import examples

FIRST, SECOND, THIRD = (examples.ref(name) for name in ("first", "second", "third"))


def test_each_is_taken_once() -> None:
    kept = TrajectoryCache()
    kept.keep(FIRST, b"states")
    assert kept.take(FIRST) == b"states"
    assert kept.take(FIRST) is None


def test_the_oldest_make_room() -> None:
    kept = TrajectoryCache(max_bytes=10)
    kept.keep(FIRST, b"11111")
    kept.keep(SECOND, b"22222")
    kept.keep(THIRD, b"333")
    assert [kept.take(ref) for ref in (FIRST, SECOND, THIRD)] == [None, b"22222", b"333"]


def test_what_is_kept_again_counts_once() -> None:
    kept = TrajectoryCache(max_bytes=10)
    for ref in (FIRST, SECOND, FIRST):
        kept.keep(ref, b"12345")
    assert [kept.take(ref) for ref in (FIRST, SECOND)] == [b"12345", b"12345"]


def test_one_that_is_larger_than_all_room_is_not_kept() -> None:
    kept = TrajectoryCache(max_bytes=4)
    kept.keep(FIRST, b"11111")
    assert kept.take(FIRST) is None
