"""Sites of the simulated cluster: what crosses their lines, and how long that takes."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.fluid.events import LinkMeasured, VersionLoaded
from services.scheduler.costs.profile import load_profile
from services.scheduler.sim.measured import SimulationResult
from services.scheduler.sim.profiled import simulate
from services.scheduler.sim.sites import Line, SimSite, Site
from services.scheduler.sim.world import World
from shared.recipe.schedule import RunSchedule

MBIT = 1e6 / 8
QWEN = load_profile("qwen-image")
ADAPTER = 1.7e9
SAMPLE = 786_432
"""Bytes of a sample of Qwen-Image: three states in bfloat16, and half of its pixels."""


def lab(mbits: float, **keys: Any) -> Site:
    given = {"count": 4, "up": mbits * MBIT, "down": mbits * MBIT, **keys}
    return Site(name="lab", kind="A100", **given)


def qwen(*sites: Site, mode: str = "disaggregated", near: int = 2) -> SimulationResult:
    schedule = RunSchedule.model_validate({"mode": mode, "tag": 0, "fragment_size": 8})
    return simulate(
        QWEN, rollout={"A100": near} if near else {}, trainer={"H100": 4}, schedule=schedule,
        sites=sites, sample_bytes=SAMPLE, batches=2, seed=None,
    )  # fmt: skip


def ends(line: Line, transfers: Sequence[tuple[float, float]]) -> list[float]:
    """Return when transfers end that begin at these seconds, with so many bytes."""
    found = [0.0] * len(transfers)

    def begin(number: int, size: float) -> None:
        line.send(size, lambda: found.__setitem__(number, line.world.now))

    for number, (at, size) in enumerate(transfers):
        line.world.after(at, lambda number=number, size=size: begin(number, size))  # type: ignore[misc]
    line.world.run(1e9, lambda: False)
    return found


def test_transfers_share_a_line() -> None:
    line = Line(World(), rate=10.0, delay=0.5)
    assert ends(line, [(0, 100), (0, 50), (8, 100)]) == [21.5, 11.5, 25.5]
    assert line.num_bytes == pytest.approx(250)


def test_a_transfer_that_is_given_up_leaves_the_line_to_others() -> None:
    line, end = Line(World(), rate=10.0, delay=0.0), list[float]()
    old = line.send(1000, lambda: end.append(-1))
    line.send(100, lambda: end.append(line.world.now))
    line.world.after(4.0, lambda: line.stop(old))
    line.world.run(1e9, lambda: False)
    assert end == [pytest.approx(12.0)]


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(1, 1e10)), min_size=1, max_size=8))
def test_a_line_is_never_idle_and_never_faster_than_its_rate(
    transfers: list[tuple[float, float]],
) -> None:
    line = Line(World(), rate=1e6, delay=0.0)
    found, total = ends(line, transfers), sum(size for _, size in transfers)
    assert line.num_bytes == pytest.approx(total, rel=1e-6, abs=10)
    first, last = min(at for at, _ in transfers), max(at for at, _ in transfers)
    assert first + total / 1e6 - 1e-3 <= max(found) <= last + total / 1e6 + 1e-3
    assert all(
        end - at >= size / 1e6 - 1e-3 for end, (at, size) in zip(found, transfers, strict=True)
    )


def test_a_site_fetches_a_version_once_and_an_older_one_no_longer() -> None:
    world, reports, come = World(), list[object](), list[tuple[str, float]]()
    site = SimSite(lab(8), world, reports.append)

    def fetch(version: int, name: str) -> None:
        site.fetch(version, 10e6, name, lambda: come.append((name, world.now)))

    for at, version, name in ((0, 1, "a"), (0, 1, "b"), (5, 2, "a"), (6, 2, "b"), (20, 2, "c")):
        world.after(at, lambda version=version, name=name: fetch(version, name))  # type: ignore[misc]
    world.run(1e9, lambda: False)
    assert come == [("a", 15.0), ("b", 15.0), ("c", 20.0)]
    assert site.version == 2
    assert site.down.num_bytes == pytest.approx(15e6)
    links = [each for each in reports if isinstance(each, LinkMeasured)]
    assert [(each.address, each.up) for each in links] == [("a", None), ("b", None)]
    assert [each.down for each in links] == pytest.approx([1e-6, 1e-6])
    assert [each for each in reports if each not in links] == [
        VersionLoaded("a", 2), VersionLoaded("b", 2)
    ]  # fmt: skip


def test_a_line_that_is_fast_enough_costs_nothing() -> None:
    near, far = qwen(near=6), qwen(lab(1e6))
    assert far.step_seconds == pytest.approx(near.step_seconds, rel=0.02)
    use = far.sites["lab"]
    assert use.samples / 512 == pytest.approx(4 / 6, abs=0.1)
    assert use.down == pytest.approx(ADAPTER, rel=1e-3), "a version is fetched once"
    assert use.up == pytest.approx(use.samples * SAMPLE, rel=0.1)


def test_a_version_and_samples_take_as_long_as_their_bytes() -> None:
    """1.7 GB take 13.6 s at 1 Gbit/s, in which only two of six devices generate."""
    near, far = qwen(near=6), qwen(lab(1000))
    lost = far.step_seconds - near.step_seconds
    assert 0.5 * 13.6 * 4 / 6 < lost < 1.2 * 13.6
    narrow = qwen(lab(1000, up=10 * MBIT))
    assert narrow.sites["lab"].up < narrow.step_seconds * 10 * MBIT * 1.01
    assert narrow.step_seconds > far.step_seconds


def test_one_sum_of_a_site_that_trains_crosses_for_each_update() -> None:
    near = simulate(
        QWEN, rollout={}, trainer={"H100": 4, "A100": 4}, batches=2, seed=None,
        schedule=RunSchedule(mode="fluid", fragment_size=8),
    )  # fmt: skip
    fast = qwen(lab(1e6, trains=True), mode="fluid", near=0)
    assert fast.step_seconds == pytest.approx(near.step_seconds, rel=0.02)
    far = qwen(lab(10_000, trains=True), mode="fluid", near=0)
    use, sums = far.sites["lab"], QWEN.shape.updates * ADAPTER
    assert use.down == pytest.approx(sums, rel=0.01)
    assert use.up == pytest.approx(sums + use.samples * SAMPLE, rel=0.1)
    seconds = 2 * sums / (10_000 * MBIT)
    assert far.step_seconds - near.step_seconds == pytest.approx(seconds, rel=0.2)
