"""`digenrl check` ends with a verdict on the machine it is on, or on the devices that are named."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.local.checking.verdict import gpu_kinds
from digenrl.planning.ledger import Card
from services.scheduler.costs.profile import load_profile
from shared.errors import UserError
from tests import tiny_models
from tests.paths import DIGITS, ROOT

DRIVER = """#!/bin/sh
case "$1" in
  -L) for n in $(seq 0 {last}); do echo "GPU $n: {name} (UUID: GPU-$n)"; done ;;
  *) for n in $(seq 0 {last}); do echo "$n, GPU-$n, {name}, 81559"; done ;;
esac
"""
NO_GPU = (
    "this cannot run here: trainer.devices, rollout.workers: 8 GPUs needed (8 to train "
    "and generate), none found; lower these keys, name the GPUs in CUDA_VISIBLE_DEVICES, or set "
    'model.device = "cpu"'
)


def check(*words: str) -> tuple[int, list[str], list[str]]:
    """Exit code, and lines of both outputs."""
    found = CliRunner().invoke(app, ["check", *words])
    lines = found.stdout.splitlines()
    if isinstance(found.exception, UserError):  # which `run_command` prints
        return 2, lines, str(found.exception).splitlines()
    return found.exit_code, lines, found.stderr.splitlines()


def with_gpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str = "NVIDIA H100 80GB HBM3"
) -> None:
    """Put a program before the driver's own that lists these GPUs."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(DRIVER.format(last=number - 1, name=name))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def flux(tmp_path: Path) -> list[str]:
    """The shipped recipe for 8 GPUs with a tiny FLUX.1, whose reward is of a Python file."""
    folder = tiny_models.save("flux", tmp_path / "flux1-dev")
    (tmp_path / "mine.py").write_text("def score(images):\n    return [0.0 for _ in images]\n")
    (tmp_path / "prompts.txt").write_text("a red apple\n")
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        f'base = "{ROOT}/recipes/flux1-dev.toml"\n[model]\nfolder = "{folder}"\n'
        '[data]\nprompts = "prompts.txt"\n[evaluation]\nprompts = "prompts.txt"\n'
        '[[reward.scorers]]\nname = "mine"\ntype = "python"\nsource = "mine.py"\n'
    )
    return [str(recipe), "--profile", "flux1-dev"]


def test_a_recipe_for_the_cpu_can_run_here() -> None:
    code, lines, errors = check(str(DIGITS))
    assert (code, errors) == (0, [])
    assert lines[-1] == "this can run here: on the CPU"
    assert not any("0.0 GiB" in line for line in lines)


def test_a_machine_without_gpus_is_refused_with_what_is_needed(
    flux: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with exit code 0 and without a verdict, and `digenrl up` refused."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, _, errors = check(*flux)
    assert (code, errors) == (2, [NO_GPU])
    code, lines, _ = check(*flux, "--json")
    said = json.loads("\n".join(lines))
    assert (code, said["ok"], said["verdict"]) == (2, False, NO_GPU)


@pytest.mark.slow
def test_the_machine_s_own_gpus_have_a_forecast(
    flux: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(tmp_path / "bin", monkeypatch, 8)
    code, lines, errors = check(*flux)
    assert (code, errors) == (0, [])
    named = check(*flux, "--devices", "h100=8")[1][-1]
    assert named.startswith("this can run on h100=8: ")
    figures = named.removeprefix("this can run on h100=8: ")
    assert lines[-1] == f"this can run here: on 8 x NVIDIA H100 80GB HBM3: {figures}"
    assert " s per step, " in figures and figures.endswith(" of 79 GiB")


def test_gpus_of_an_unknown_kind_run_without_a_forecast(
    flux: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(tmp_path / "bin", monkeypatch, 8, "Some New Card")
    assert check(*flux)[1][-1] == (
        "this can run here: on 8 x Some New Card; no cost profile fits, so that the step time is "
        "unknown: --trace counts the memory"
    )


def test_everything_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    options = ["--data.prompts", str(tmp_path / "no.txt"), "--evaluation.digits", "/none"]
    code, _, errors = check(str(DIGITS), "--model.folder", str(tmp_path / "no"), *options)
    assert code == 2
    assert [line.split(":")[0] for line in errors] == [
        "model.folder", "data.prompts", "evaluation.digits",
    ]  # fmt: skip


def test_a_gpu_s_kind_is_the_longest_that_its_name_has() -> None:
    profile = load_profile("flux1-dev")

    def of(*names: str) -> str | None:
        return gpu_kinds([Card("", name, 39.4) for name in names], profile)

    assert of("NVIDIA L40S", "NVIDIA L40S", "NVIDIA A100-SXM4-80GB") == "L40S=2,A100=1"
    assert of("NVIDIA H100 NVL", "Some New Card") is None
    assert of() is None
    part = "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    assert of(part, part, "NVIDIA L40S") == "A100-3g.40gb=39.4GiB*2,L40S=1"
