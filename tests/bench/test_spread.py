"""What hosts read of a version, in network namespaces with slow lines."""

from pathlib import Path
from statistics import median

import pytest

from bench.spread.network import why_not
from bench.spread.run import measure, measure_sites


@pytest.mark.slow
@pytest.mark.clock
@pytest.mark.broker
def test_eight_hosts_have_a_version_within_half_again_the_time_of_one(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    one, eight = measure(
        (1, 8), workers=8, size=100_000_000, versions=3, megabytes_per_s=50, folder=tmp_path
    )
    assert one.from_store == one.digested == pytest.approx(1, abs=0.01)
    assert eight.from_store == pytest.approx(1, abs=0.01)
    assert eight.from_peers == pytest.approx(7, abs=0.01)
    assert eight.digested == pytest.approx(8, abs=0.01)
    assert median(eight.seconds) <= 1.5 * median(one.seconds)


@pytest.mark.slow
@pytest.mark.clock
@pytest.mark.broker
def test_a_site_fetches_a_version_once_and_near_hosts_take_as_long_as_without_it(
    tmp_path: Path,
) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    alone, together = (
        measure_sites(
            [50.0] * 4, [50.0] * far, 2.5, size=10_000_000, versions=20, megabytes_per_s=50,
            folder=tmp_path / str(far),
        )
        for far in (0, 4)
    )  # fmt: skip
    near = median(max(seconds) for seconds in alone.by_worker)
    assert all(max(seconds[:4]) <= 1.5 * max(near, 0.5) for seconds in together.by_worker)
    assert together.from_store == pytest.approx(2, abs=0.06)


@pytest.mark.slow
@pytest.mark.clock
@pytest.mark.broker
def test_a_slow_host_that_names_no_site_delays_near_hosts_by_no_more_than_the_first_version(
    tmp_path: Path,
) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    found = measure_sites(
        [50.0] * 4 + [1.25], [], 1.25, size=10_000_000, versions=6, megabytes_per_s=50,
        folder=tmp_path,
    )  # fmt: skip
    assert all(max(seconds[:4]) < 2 < seconds[4] for seconds in found.by_worker[1:])
