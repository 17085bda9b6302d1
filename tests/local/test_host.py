"""`digenrl host`: which processes a host among others runs, and what it refuses."""

import os
import threading
from pathlib import Path

import pytest

from digenrl.commands import host
from digenrl.local.hosts import first_host
from digenrl.local.hosts.host import parse_gpus
from digenrl.local.processes.assignment import assign_gpus
from digenrl.local.processes.gpus import visible_cards
from digenrl.local.running.command_lines import worker_programs
from digenrl.local.secrets.certificates import authority_in
from digenrl.local.secrets.keys import Keys
from digenrl.planning.entries import host_processes
from digenrl.planning.ledger import Card
from shared.errors import UserError
from shared.messages.rights import Role
from shared.recipe.recipe import Recipe, load_recipe, override
from tests.paths import RECIPES

SD35 = load_recipe(RECIPES / "sd35-medium.toml")
DIGITS = load_recipe(RECIPES / "digits.toml")


def started(recipe: Recipe, roles: tuple[Role, ...], gpus: int) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each process of the host `lab-2` with so many GPUs."""
    cards = [Card(str(number)) for number in range(gpus)]
    processes = host_processes(recipe, roles, len(cards))
    environments = assign_gpus(recipe, cards, processes).environments
    programs = worker_programs(
        recipe, processes, Keys(Path("keys")), environments, host="lab-2", stays=False
    )
    return {each.name: each.environment["CUDA_VISIBLE_DEVICES"] for each in programs}


@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("role", ["rollout", "trainer"])
def test_each_gpu_of_a_host_is_used_exactly_once(role: Role, gpus: int) -> None:
    found = started(SD35, (role,), gpus)
    assert found == {f"lab-2-{role}-{number}": str(number) for number in range(gpus)}


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_gpus_that_the_driver_lists_are_used_exactly_once(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = "".join(f"GPU {n}: NVIDIA H200 (UUID: GPU-{n})\\n" for n in range(gpus))
    queried = "".join(f"{n}, GPU-{n}, NVIDIA H200, 143771\\n" for n in range(gpus))
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] && printf '{listed}' || printf '{queried}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cards = visible_cards()
    assert [card.kind for card in cards] == ["NVIDIA H200"] * gpus
    roles: tuple[Role, ...] = ("rollout",)
    processes = host_processes(SD35, roles, len(cards))
    environments = assign_gpus(SD35, cards, processes).environments
    used = [environments[name]["CUDA_VISIBLE_DEVICES"] for name in processes.names("rollout")]
    assert used == [str(number) for number in range(gpus)]


@pytest.mark.parametrize("gpus", [2, 8])
def test_a_host_that_trains_and_generates_trains_with_its_first_gpus(gpus: int) -> None:
    recipe = override(
        SD35, {"trainer.devices": 4, "rollout.workers": 4, "schedule.mode": "disaggregated"}
    )
    found = started(recipe, ("rollout", "trainer"), gpus)
    assert sorted(found.values()) == [str(number) for number in range(gpus)]
    members = [name for name in found if "-trainer-" in name]
    assert members == [f"lab-2-trainer-{number}" for number in range(min(4, gpus - 1))]


def test_the_gpus_of_a_host_form_shard_groups_in_order() -> None:
    recipe = override(SD35, {"trainer.devices": 4, "trainer.shard_devices": 2})
    assert started(recipe, ("trainer",), 5) == {"lab-2-trainer-0": "0,1", "lab-2-trainer-2": "2,3"}


def test_a_host_without_gpus_has_one_process_of_each_role_of_a_recipe_for_the_cpu() -> None:
    found = started(DIGITS, ("rollout", "trainer", "reward"), 0)
    assert sorted(found) == ["lab-2-reward-0", "lab-2-rollout-0", "lab-2-trainer-0"]


@pytest.mark.parametrize(
    ("recipe", "roles", "gpus", "line"),
    [
        (SD35, ("rollout",), 0, "--gpus: this host has no GPU, and model.device is not cpu"),
        (override(SD35, {"trainer.devices": 4, "trainer.shard_devices": 4}), ("trainer",), 2,
         "--roles, --gpus: 4 GPUs needed on this host"),
        (SD35, ("encoder",), 2, "--roles: the recipe has no work for encoder"),
    ],
)  # fmt: skip
def test_a_host_that_cannot_do_any_of_its_work_is_refused(
    recipe: Recipe, roles: tuple[Role, ...], gpus: int, line: str
) -> None:
    with pytest.raises(UserError, match=f"^{line}"):
        host_processes(recipe, roles, gpus)


@pytest.mark.parametrize("text", ["", "3-1", "a", "0,,1", "0-3,2", "-1"])
def test_numbers_of_gpus_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^--gpus: "):
        parse_gpus(text, "--gpus")


def test_logs_of_a_host_are_printed_once_and_their_files_do_not_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(host, "MAX_LOG_TAIL_BYTES", 100)
    path, positions = tmp_path / "rollout-0.log", dict[Path, int]()
    ended = threading.Event()
    ended.set()  # the logs are read once
    for number in range(100):
        with path.open("a") as file:
            file.write(f"line {number}\n" * 10)
        host._print_logs(tmp_path, positions, ended)
        assert path.stat().st_size <= 1000 and path.read_text().endswith(f"line {number}\n" * 9)
    expected = [f"rollout-0: line {number}" for number in range(100) for _ in range(10)]
    assert capsys.readouterr().out.splitlines() == expected


def test_the_servers_of_a_first_host_have_certificates_of_its_present_address(
    tmp_path: Path,
) -> None:
    """A requeued Slurm job may start on another node, with the same folder."""
    authority = authority_in(tmp_path / "keys" / "ca")
    before = dict[Path, bytes]()
    for address in ("127.0.0.2", "127.0.0.3"):
        first_host._prepare(address, tmp_path)
        for folder in (tmp_path / "tls", tmp_path / "keys" / "scheduler"):
            certificate = authority.certificate(folder, [address]).cert.read_bytes()
            assert before.get(folder) != certificate
            before[folder] = certificate
