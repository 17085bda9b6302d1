"""A tiny emulated cluster over real services: four devices, batches of half a second."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.cluster import lost_host
from bench.cluster.build import member_hosts
from bench.cluster.measured import measure
from bench.cluster.session import EmulatedRun, opened, run
from bench.cluster.setting import Setting
from bench.runner.session import Session
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.sim.profiled import simulate
from shared.errors import UserError
from shared.recipe.schedule import RunSchedule
from tests.profile.tiny import GROUP_SIZE, GROUPS, tiny_profile

pytestmark = [pytest.mark.run, pytest.mark.timeout(120)]

WARM_UP, LAST = 1, 3
FRAGMENT = 2


def setting(folder: Path, **changes: object) -> Setting:
    plain = Setting(
        run="tiny", profile=str(tiny_profile(folder)), rollout={"H100": 2}, trainer={"H100": 2},
        scale=20.0, steps=LAST + 1, schedule=RunSchedule(fragment_size=FRAGMENT, tag=1),
    )  # fmt: skip
    return plain.model_copy(update=changes)


def check(run: EmulatedRun) -> None:
    found = measure(run, WARM_UP, LAST)
    bound = floor_seconds(run.setting.load_profile(), {"H100": 4}) / run.setting.scale
    assert bound <= found.step_seconds < 6 * bound
    assert len(run.commits) == LAST + 1 and len(found.batch_seconds) == LAST - WARM_UP
    assert found.messages["DG_TRAIN"] == pytest.approx(GROUPS, abs=GROUPS / 2)
    for shares in found.shares.values():
        assert sum(shares.values()) == pytest.approx(1.0) and shares["idle"] > -0.01
    assert all(found.cpu[name] > 0 for name in ("scheduler", "rollout", "members-0", "nats"))


def samples_by(run: EmulatedRun, role: str) -> float:
    begin, end = run.commits[WARM_UP], run.commits[LAST]
    return sum(
        each.samples
        for each in run.intervals
        if each.device.startswith(role) and begin <= each.begin < end
    )


def services_as_they_joined(session: Session, run: EmulatedRun) -> list[str]:
    """Return the services of the workers that the scheduler's log names."""
    log = (session.folder / run.setting.run / "logs" / "scheduler.log").read_text()
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [event["service"] for event in events if event["event"] == "worker_joined"]


FLUID = {"rollout": {}, "trainer": {"H100": 4}, "host_devices": 2, "scale": 10.0, "run": "fluid"}


def check_fluid(run: EmulatedRun) -> None:
    """Two hosts of two members do what the simulator says, to the order of magnitude."""
    pool, schedule = run.setting.trainer, run.setting.schedule
    found = measure(run, WARM_UP, LAST)
    simulated = simulate(
        run.setting.load_profile(), rollout={}, trainer=pool, schedule=schedule, batches=2
    )
    utilisation = simulated.floor_seconds / run.setting.scale / found.step_seconds
    assert simulated.utilisation / 2 < utilisation < 1.2, "seconds depend on what else runs here"
    assert {each.device for each in run.intervals} == {f"trainer-h100-{n}" for n in range(4)}


@pytest.mark.slow
async def test_roles_run_and_are_measured(tmp_path: Path) -> None:
    versions: list[int] = []
    async with opened(tmp_path / "bench") as session:
        strict = await run(session, setting(tmp_path), WARM_UP, LAST, versions.append)
        services = services_as_they_joined(session, strict)
    check(strict)
    assert versions == list(range(LAST + 1))
    assert Counter(services) == {"rollout": 2, "trainer": 2, "reward": 2}
    batches = LAST - WARM_UP
    wasted = batches * FRAGMENT  # a device that is taken back in the middle of a fragment drops it
    total = samples_by(strict, "rollout") + samples_by(strict, "trainer")
    wanted = batches * GROUPS * GROUP_SIZE
    # A denoising step that begins before the watcher has seen the commit is the batch before's.
    assert wanted - FRAGMENT < total < wanted + wasted, "on-policy, all in its batch"
    by_trainer = samples_by(strict, "trainer") / GROUP_SIZE
    assert by_trainer == pytest.approx(batches, abs=wasted / GROUP_SIZE), "one group each"
    assert not list((tmp_path / "bench").iterdir()), "nothing is left"


@pytest.mark.slow
async def test_fluid_devices_run_and_are_measured_after_roles(tmp_path: Path) -> None:
    """Both run in one session, where the second shares nothing but the brokers with the first."""
    async with opened(tmp_path / "bench") as session:
        await run(session, setting(tmp_path), WARM_UP, LAST, lambda _: None)
        changes = {**FLUID, "schedule": RunSchedule(mode="fluid")}
        fluid = await run(session, setting(tmp_path, **changes), WARM_UP, LAST, lambda _: None)
    check_fluid(fluid)
    early = len(member_hosts(fluid.setting)) * 2 * FRAGMENT
    wanted = (LAST - WARM_UP) * GROUPS * GROUP_SIZE
    assert samples_by(fluid, "trainer") == pytest.approx(wanted, abs=early), "some begin early"
    begin, end = fluid.commits[WARM_UP], fluid.commits[LAST]
    uses = Counter(each.use for each in fluid.intervals if begin <= each.begin < end)
    assert uses["exchange"] == uses["commit"] == 4 * uses["snapshot"] > 0
    assert not list((tmp_path / "bench").iterdir()), "nothing is left"


@pytest.mark.slow
async def test_one_step_ahead_both_run_and_are_measured(tmp_path: Path) -> None:
    async with opened(tmp_path / "bench") as session:
        schedule = setting(tmp_path).schedule.changed(max_staleness=1)
        changes = {"schedule": schedule, "run": "ahead"}
        ahead = await run(session, setting(tmp_path, **changes), WARM_UP, LAST, lambda _: None)
        schedule = RunSchedule(mode="fluid", max_staleness=1)
        changes = {**FLUID, "schedule": schedule}
        fluid = await run(session, setting(tmp_path, **changes), WARM_UP, LAST, lambda _: None)
    check(ahead)
    check_fluid(fluid)


@pytest.mark.slow
async def test_a_host_that_dies_in_mid_run_comes_back_and_what_it_has_cost_is_told(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path / "bench") as session:
        changes = {**FLUID, "schedule": RunSchedule(mode="fluid"), "run": "lost"}
        found = await lost_host.measure(session, setting(tmp_path, **changes))
        with pytest.raises(UserError, match="two or more"):
            await lost_host.measure(session, setting(tmp_path))
    assert found.host == "members-1" and found.struck == 2 * lost_host.WARM_UP
    assert len(found.batch_seconds) == found.struck + 1 + lost_host.AFTER
    assert 0 < found.lost_after < found.batch_seconds[found.struck]


def test_lost_seconds_are_those_beyond_the_usual_ones() -> None:
    found = lost_host.LostHost(
        host="members-1", scale=4.0, batch_seconds=[9.0, 3.0, 2.0, 2.0, 7.0, 2.5, 2.0, 2.0],
        struck=4, lost_after=1.0,
    )  # fmt: skip
    assert found.usual_seconds == 2.0
    assert found.lost_seconds == 5.5
