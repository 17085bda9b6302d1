"""Processes are killed at each named point of a commit, and nothing is repeated or left out."""

import re
import signal
from pathlib import Path

import pytest

from tests.storm.cluster import Cluster, cluster, until
from tests.storm.judge import violations_of
from tests.storm.small import small

ROOT = Path(__file__).parents[2]
OF_ROLES = ("trainer.", "commit.", "scheduler.", "reward.")
"""What the points of services that have a role begin with; those of fluid devices have tests of
their own."""


def points() -> list[str]:
    """The points that services name."""
    files = (ROOT / "services").rglob("*.py")
    found = {p for file in files for p in re.findall(r'\breach\("([^"]+)"\)', file.read_text())}
    return sorted(found)


def test_the_points_of_a_commit_are_those_that_the_documentation_names() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    table = text.split("## The points of a commit")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([^`]+)`", " ".join(rows))) == points()


def victim(point: str) -> str:
    service = point.split(".")[0]
    return {"commit": "trainer", "reward": "reward-0"}.get(service, service)


async def kill_at(run: Cluster, point: str) -> None:
    """Start a process again that ends at a point, wait until it has, and until the run goes on.

    It is not started before the point is named. Otherwise one that was just being started, after
    the point before, might take the name, and be killed in place of the one that was meant.
    """
    name = victim(point)
    child = run.children[name]
    child.kept = False
    child.send(signal.SIGKILL)
    await until(lambda: not child.is_alive)
    (run.folder / f"fail-{name}").write_text(f"{point}:1")
    starts, child.kept = child.num_starts, True

    async def has_ended() -> bool:
        return child.num_starts >= starts + 2

    await run.until(has_ended, f"{name} ends at {point} and is started again")
    await run.until_step(await run.num_commits())


@pytest.mark.run
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.night)])
async def test_a_process_that_is_killed_at_each_point_repeats_and_leaves_out_nothing(
    tmp_path: Path, times: int
) -> None:
    setting = small(tmp_path, steps=100_000, tag=1)
    async with cluster(tmp_path / "run", setting) as run:
        await run.until_step(3)
        for _ in range(times):
            for point in points():
                if point.startswith(OF_ROLES):
                    await kill_at(run, point)
        assert await violations_of(run) == []
