"""What hosts read of a version, in network namespaces with slow lines."""

from pathlib import Path
from statistics import median

import pytest

from bench.spread.network import why_not
from bench.spread.run import measure


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
