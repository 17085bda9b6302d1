"""Runs, transfers and sums over lines with delay, loss, a queue and cuts, between network
namespaces. `python -m bench far-runs` and `far-transfers` measure the same."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pytest

from bench.spread.far_line import FarLine
from bench.spread.far_run import Mode, measure_run
from bench.spread.far_sums import NUM_PIECES, Rates, Transport, measure_sums, trained_shares
from bench.spread.network import why_not
from bench.spread.transfers import Cut, measure_transfers
from services.scheduler.core.fluid.links import choose_committer, is_by_store
from services.scheduler.core.inputs import LinkMeasured
from services.scheduler.limits import LEASE_S
from shared.store.bucket import PART
from tests.paths import ROOT
from tests.scheduler.core.test_slow_lines import MB, run_of

pytestmark = [pytest.mark.night, pytest.mark.clock, pytest.mark.broker, pytest.mark.timeout(1800)]

MIB = 1 << 20


@pytest.fixture(autouse=True)
def far_lines() -> None:
    if reason := why_not(far=True):
        pytest.skip(reason)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Yield a folder whose objects no other process's use of the disk delays."""
    memory = Path("/dev/shm")
    place = memory if memory.is_dir() else None
    with TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.run
@pytest.mark.parametrize("near", [1, 2])
@pytest.mark.parametrize(
    ("mode", "exchange"), [("fluid", "store"), ("fluid", "group"), ("roles", "store")]
)
@pytest.mark.parametrize("mbits", [(1.0,), (0.3,), (0.1,), (1.0, 0.1)])
def test_a_run_with_a_far_worker_ends_and_the_far_worker_reports_what_it_declines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    mode: Mode, exchange: str, near: int, mbits: tuple[float, ...],
) -> None:  # fmt: skip
    monkeypatch.setenv("DIGENRL_MODELS", str(ROOT / "models"))
    together = max(6, round(15 / min(mbits)))  # longer than a version takes to arrive
    run = measure_run(
        tmp_path, mode, [FarLine(each) for each in mbits],
        near=near, alone=5, together=together, exchange=exchange,
    )  # fmt: skip
    assert (run.phase, run.step) == ("finished", 5 + together * len(mbits))
    assert run.missed == 0 and all('"address": "far-' in each for each in run.lost)
    assert all(run.done[f"near-{number}"] for number in range(near))
    assert run.declined
    for each in run.declined:
        assert each.startswith(("takes no part: ", "generates only: ", "trains only: "))
        assert re.search(r" [0-9.,]+ s (at [0-9.,]+ Mbit/s|to arrive)$", each)


LINES = [FarLine(m, loss=0.001, queue_bytes=q) for m in (4, 10) for q in (1 << 16, int(m * MB / 8))]


@pytest.mark.run
def test_a_worker_whose_lease_ended_during_a_cut_takes_part_again_within_5_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_MODELS", str(ROOT / "models"))
    run = measure_run(tmp_path, "roles", [FarLine(4.0)], near=1, alone=5, together=200, cut_s=30.0)
    assert (run.phase, run.step) == ("finished", 205)
    assert len(run.lost) == 1
    assert run.back is not None and run.back <= 5.0


def test_objects_cross_a_line_with_loss_in_nearly_the_ideal_time_and_statuses_come_meanwhile(
    in_memory: Path,
) -> None:
    for found in measure_transfers(LINES, size=30 * MIB, times=3, folder=in_memory):
        assert all(each.factor(found.line) <= 1.15 for each in found.transfers), found
        assert found.late <= 2.0 < LEASE_S
        rate = found.line.mbits * MB / 8
        assert all(each.rate == pytest.approx(rate, rel=0.15) for each in found.transfers[-2:])
        for each in found.transfers:
            assert each.on_line - each.resent == pytest.approx(each.num_bytes, rel=0.03), each


def test_after_a_cut_an_object_continues_and_its_worker_is_back_within_seconds(
    in_memory: Path,
) -> None:
    cut = Cut(after_s=5.0, seconds=30.0)
    for found in measure_transfers(LINES[1::2], size=30 * MIB, times=1, folder=in_memory, cut=cut):
        assert found.late <= 5.0
        for each in found.transfers:
            assert each.on_line <= 1.03 * each.num_bytes + 2 * PART, each


def test_after_a_drop_from_100_to_10_mbits_the_scheduler_knows_the_rate_within_five_transfers(
    in_memory: Path,
) -> None:
    [found] = measure_transfers(
        [FarLine(100.0)], size=20 * MB, times=10, folder=in_memory, then=FarLine(10.0)
    )
    assert found.estimates == pytest.approx((1.25 * MB, 1.25 * MB), rel=0.15)


def chosen(rates: Mapping[str, Rates]) -> tuple[str, bool]:
    """Return the scheduler's choice of the committer, and of the way of sums."""
    names = list(NUM_PIECES)
    run = run_of(20 * MB, *[None] * len(names))
    for number, name in enumerate(names):
        up, down = (None if each is None else 1 / each for each in rates[name])
        run.give(LinkMeasured(f"trainer-{number}-a", up, down))
    shares = [
        each.model_copy(update={"worker": f"trainer-{names.index(each.worker)}-a"})
        for each in trained_shares()
    ]
    assert run.state.fluid is not None
    by_store = is_by_store(run.state, run.state.fluid, 20 * MB, list(run.state.workers))
    committer = choose_committer(run.state, run.state.fluid, shares)
    return names[int(committer.split("-")[1])], by_store


@pytest.mark.parametrize("transport", ["store", "group"])
def test_near_members_hold_the_total_as_soon_as_the_far_sum_has_arrived(
    in_memory: Path, transport: Transport
) -> None:
    seconds = measure_sums(
        FarLine(10.0), size=20 * MB, transport=transport, folder=in_memory, choose=chosen
    )
    assert max(seconds["near-0"], seconds["near-1"]) <= 1.15 * 16
    assert median(seconds.values()) < seconds["far"]
