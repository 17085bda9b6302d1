"""What a commit takes, as it is read off what the devices did."""

from pathlib import Path

import pytest

from bench.cluster import unscaled
from bench.cluster.payloads import payload_of, whole
from bench.cluster.rows import UNSCALED
from bench.cluster.unscaled import PlainWrites, check_room, commit_of, needed_bytes, write_plainly
from bench.runner.figures import Interval
from shared.errors import UserError
from tests.waiting import until

BEFORE = [
    Interval("a", "train", 0.0, 9.0),
    Interval("b", "train", 0.0, 10.0),
    Interval("b", "commit", 10.1, 10.2),
    Interval("a", "commit", 10.1, 10.2),
    Interval("a", "snapshot", 10.2, 10.5),
]


def test_a_commit_is_from_the_last_piece_to_each_device_s_next_fragment() -> None:
    following = [
        Interval("b", "generate", 10.25, 12.0),
        Interval("a", "generate", 10.55, 12.0),
        Interval("b", "generate", 12.0, 13.0),
    ]
    found = commit_of([*following, *BEFORE], 10.9, 11.4)
    assert [round(each, 3) for each in found.others] == [0.25]
    assert found.committer is not None and round(found.committer, 3) == 0.55
    assert (round(found.fetchable, 3), round(found.committed, 3)) == (0.4, 0.9)


def test_the_last_commit_of_a_run_has_no_next_fragment() -> None:
    later = Interval("a", "snapshot", 20.0, 20.3)
    found = commit_of([*BEFORE, later], 10.9, 11.4)
    assert found.others == [] and found.committer is None
    assert round(found.committed, 3) == 0.9


async def test_as_many_bytes_are_written_plainly_in_the_middle_of_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unscaled, "MIDDLE_S", 0.0)
    plain = PlainWrites(tmp_path, last=2, sizes=(20_000_000, 30_000_000))
    for version in range(4):
        plain.follow(version)
    await until(lambda: len(plain.seconds) == 2)
    assert names_in(tmp_path) == []
    assert all(0 < weights < both for weights, both in plain.seconds)


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_what_is_written_plainly_has_all_its_bytes(tmp_path: Path) -> None:
    seconds = write_plainly(tmp_path / "plain", 20_000_001)
    assert seconds > 0 and (tmp_path / "plain").stat().st_size == 20_000_001


def test_a_disk_with_too_little_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    case = UNSCALED.case(rounds=1, batches=6, one_step_batches=2)
    sizes = whole(UNSCALED.profile)
    needed = needed_bytes(sizes, case.setting(case.modes[0], 0), 6)
    assert 8 * 6_800_000_000 < needed < 9 * 6_800_000_000
    check_room(tmp_path / "new", 1)
    with pytest.raises(UserError, match=r"folder: .* GB of 1000000 that are stored; .*--batches"):
        check_room(tmp_path, 10**15)


def test_nothing_of_an_unscaled_run_is_left_out() -> None:
    sizes, payload = whole(UNSCALED.profile), payload_of(UNSCALED.profile)
    assert sizes.adapter == 1_700_000_000
    assert sizes.checkpoint == 3 * sizes.adapter
    assert sizes.window == 2 * payload.window  # float32
    assert (sizes.media, sizes.conditions) == (payload.media, payload.conditions)
    assert UNSCALED.devices == {"H100": 8} and sum(UNSCALED.split.trainer.values()) == 8
