"""Pools are written as hosts, and a plan says what runs on each."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.local.checking.check import check
from digenrl.planning.hosts import (
    HostClass,
    Hosts,
    check_host_memory,
    commands,
    host_memory_line,
    parse_hosts,
    place,
    trains_where,
)
from digenrl.trace.memory import usual, with_memory
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.split import Split
from shared.errors import UserError
from tests.paths import RECIPES

QWEN = load_profile("qwen-image")
FOUR = Hosts((HostClass("H100", 8, 4),))


def parsed(text: str, host_gpus: int = 8) -> Hosts:
    return parse_hosts("--hosts", text, QWEN, host_gpus=host_gpus)


def test_hosts_are_written_by_their_kind_gpus_and_number() -> None:
    assert parsed("h100x8*4") == FOUR
    assert parsed("h100x8*4").devices == {"H100": 32} and parsed("H100x8*4").gpus == {"H100": 8}
    assert parsed("4090x4") == Hosts((HostClass("4090", 4, 1),))
    mixed = parsed("h100x8*2+a100x4*2, l40s=9")
    assert mixed.devices == {"H100": 16, "A100": 8, "L40S": 9}
    assert mixed.gpus == {"H100": 8, "A100": 4, "L40S": 8}
    assert str(mixed) == "h100x8*2+a100x4*2+l40sx8*1+l40sx1*1"
    assert parsed(str(mixed)) == mixed


def test_counted_devices_are_in_hosts_of_a_usual_size() -> None:
    assert parsed("h100=32") == FOUR
    assert parsed("h100=6", 8).gpus == {"H100": 6}
    assert [gpus for _, _, gpus in parsed("h100=10", 4).named()] == [4, 4, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100", "'h100' is not kind=count, e.g. h100=16,a100=16, nor hosts, e.g. h100x8*2"),
        ("h100x0*2", "'h100x0*2': GPUs and hosts are whole numbers, 1 or more"),
        ("h100x8*", "is not kind=count"),
        ("v100x8", "qwen-image knows no v100 (did you mean H100?); known are H100,"),
        ("h100x8*600", "more than 4096 devices"),
    ],
)
def test_bad_hosts_are_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        parsed(text)
    assert str(refused.value).startswith("--hosts: ") and said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("trains", [1, 6, 8, 10, 14, 31])
def test_a_trainer_is_on_the_fewest_hosts_and_workers_are_on_the_other_gpus(trains: int) -> None:
    placed = place(FOUR, Split({"H100": 32 - trains}, {"H100": trains}))
    assert sum(each.trains for each in placed) == trains
    assert sum(each.generates for each in placed) == 32 - trains
    assert all(each.trains + each.generates <= each.gpus for each in placed)
    used = [each.trains for each in placed if each.trains]
    assert len(used) == -(-trains // 8) and max(used) - min(used) <= 1


def test_fluid_devices_are_one_process_per_gpu_on_any_hosts() -> None:
    keys = {"schedule.mode": "fluid", "trainer.devices": 28, "encoder.workers": 1}
    mixed = parsed("h100x8*3+a100x4")
    placed = place(mixed, Split({"A100": 3}, {"H100": 24}))
    found = dict(commands(placed, keys, recipe="r.toml", environment={"A100": {"A": "b"}}))
    first = "digenrl host --keys KEYS --roles trainer,reward,encoder --at ADDRESS --recipe r.toml"
    assert found["h100-1"] == first
    assert found["h100-2"] == "digenrl host --keys KEYS --roles trainer"
    assert found["a100-1"] == "A=b digenrl host --keys KEYS --roles rollout --gpus 0-2"
    assert trains_where(placed) == "3 x 8"


@pytest.mark.parametrize(
    ("stated", "said"), [("4090=80", "take 89 GiB of the memory of 4090-1, which has 80"), ("", "")]
)
def test_the_memory_of_hosts_is_stated_and_never_assumed(stated: str, said: str) -> None:
    flux = load_profile("flux1-dev")
    assert flux.memory is not None
    held = with_memory(flux, usual(flux.memory), ["4090"])
    parsed = partial(parse_hosts, "--hosts", "h100x2+4090x4", flux, host_gpus=8)
    hosts = parsed()
    split = Split({"4090": 4}, {"H100": 2})
    assert "89 GiB of the memory of each host of 4090" in (
        host_memory_line(held, hosts, split) or ""
    )
    hosts = parsed(host_memory=stated or "4090=128")
    assert host_memory_line(held, hosts, split) is None
    if not said:
        check_host_memory(held, hosts, split)
        return
    with pytest.raises(UserError, match=said):
        check_host_memory(held, hosts, split)


def test_each_host_has_one_command() -> None:
    placed = place(FOUR, Split({"H100": 24}, {"H100": 8}))
    found = dict(commands(placed, {}, recipe="r.toml"))
    assert list(found) == ["h100-1", "h100-2", "h100-3", "h100-4"]
    assert found["h100-1"].startswith("digenrl host --keys KEYS --roles trainer,reward --at ")
    assert found["h100-2"] == "digenrl host --keys KEYS --roles rollout"


def test_a_host_that_trains_and_generates_has_a_command_for_each() -> None:
    [host] = place(parsed("h100x8"), Split({"H100": 3}, {"H100": 5}))
    assert dict(commands([host, replace(host, name="h100-2")], {}, recipe="r.toml"))["h100-2"] == (
        "digenrl host --keys KEYS --roles trainer --gpus 0-4 & "
        "digenrl host --keys KEYS --roles rollout --gpus 5-7 & wait"
    )


@pytest.mark.slow
def test_a_plan_for_hosts_has_keys_and_commands() -> None:
    words = ["plan", "--profile", "flux1-dev", "--hosts", "h100x2*2", "--staleness", "1", "--json"]
    found = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).output)
    assert found["hosts"] == "h100x2*2"
    for choice in found["choices"]:
        trains = choice["trainer"]["H100"]
        said, keys = " ".join(choice["commands"].values()), choice["recipe"]
        assert keys["trainer.devices"] == trains
        assert ("--roles rollout" in said) == bool(keys["rollout.workers"])
        assert sum(each["trains"] for each in choice["placed"]) == trains
        assert set(choice["commands"]) <= {"h100-1", "h100-2"}


@pytest.mark.parametrize(
    ("hosts", "roles", "said"),
    [
        ("h100x8*4", (24, 8), None),
        ("h100x8*4", (16, 16), None),
        ("h100x4*2", (2, 6), None),
        ("h100x8", (6, 4), "the recipe wants 10"),
        ("h100x4*2+a100x8", (8, 8), None),
    ],
)
def test_check_accepts_what_can_run_on_hosts(
    hosts: str, roles: tuple[int, int], said: str | None, tmp_path: Path
) -> None:
    """Roles are rollout workers and devices that train."""
    workers, devices = roles
    path = tmp_path / "hosts.toml"
    path.write_text(
        f'base = "{RECIPES / "flux1-dev.toml"}"\nschedule.mode = "disaggregated"\n'
        f"rollout.workers = {workers}\ntrainer.devices = {devices}\n"
    )
    if said is None:
        found = check(path, hosts=hosts, elsewhere=True, timing=False).forecast
        assert found is not None
        return
    with pytest.raises(UserError) as refused:
        check(path, hosts=hosts, elsewhere=True, timing=False)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_pool_is_given_once() -> None:
    path = RECIPES / "flux1-dev.toml"
    with pytest.raises(UserError, match="--hosts: give the pool by --hosts or by --devices"):
        check(path, "h100=8", hosts="h100x8", elsewhere=True)
    words = ["plan", "--profile", "flux1-dev"]
    refused = CliRunner().invoke(app, words).exception
    assert isinstance(refused, UserError) and "name the GPUs" in str(refused)
