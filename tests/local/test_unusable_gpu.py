"""A process that was given a GPU which torch cannot use ends with one line, and never computes on
the CPU instead. Torch here is a build for CPUs: to it, every GPU is one that it cannot use."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.local.checking.doctor import gpu_findings
from digenrl.local.processes.ports import free_ports
from shared.diffusion.loading import device
from shared.errors import UserError
from shared.recipe.recipe import Recipe, load_recipe
from shared.store import open_store
from shared.store.settings import StoreSettings
from tests.local.test_verdict import with_gpus
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
REFUSED = (
    f"CUDA_VISIBLE_DEVICES=3: torch {torch.__version__} cannot use this GPU: Torch not compiled "
    "with CUDA enabled; install torch for this GPU (README, Install), or compute on the CPU: set "
    'model.device = "cpu", or CUDA_VISIBLE_DEVICES="" for one process'
)


def on_gpus(folder: Path) -> Recipe:
    """The recipe of the digits, for GPUs, with an encoder and a reward that may load a network."""
    plain = load_recipe(DIGITS).model_dump(mode="json")
    (folder / "mine.py").write_text("def score(images):\n    return [0.0 for _ in images]\n")
    plain["model"]["device"] = None
    plain["encoder"]["workers"] = 1
    plain["reward"]["scorers"] = [
        {"name": "mine", "type": "python", "source": str(folder / "mine.py")}
    ]
    return Recipe.model_validate(plain)


def run(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """Run `digenrl`; return its exit code, and the last line that it printed."""
    ended = subprocess.run(
        [sys.executable, "-m", "digenrl", *words], cwd=folder, text=True, timeout=120, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **variables},
    )  # fmt: skip
    assert "Traceback" not in ended.stdout
    return ended.returncode, ended.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "service",
    [
        "rollout",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("trainer", "encoder", "reward")),
    ],
)
@pytest.mark.slow
def test_a_worker_ends_with_one_line(service: str, tmp_path: Path) -> None:
    """Each loaded its networks on the CPU and computed there."""
    url = f"file://{tmp_path}/store"
    asyncio.run(store_recipe(open_store(StoreSettings(url=url)), on_gpus(tmp_path)))
    variables = {"DIGENRL_STORE_URL": url, "CUDA_VISIBLE_DEVICES": "3"}
    found = run(tmp_path, "serve", service, "--run", "digits", **variables)
    assert found == (2, f"digenrl: {REFUSED}")


@pytest.mark.slow
def test_a_rank_ends_before_it_waits_for_the_others(tmp_path: Path) -> None:
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    variables = {"DIGENRL_STORE_URL": f"file://{tmp_path}/store", "CUDA_VISIBLE_DEVICES": "2,3"}
    words = ("serve", "trainer", "--run", "digits")
    assert run(tmp_path, *words, **ranks, **meeting, **variables) == (2, f"digenrl: {REFUSED}")


@pytest.mark.slow
def test_sampling_by_hand_ends_with_one_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.json"
    recipe.write_text(on_gpus(tmp_path).model_dump_json())
    words = ("generate", str(recipe), "--prompt", "digit 3")
    found = run(tmp_path, *words, CUDA_VISIBLE_DEVICES="3")
    assert found == (2, f"digenrl: {REFUSED}")


@pytest.mark.run
@pytest.mark.slow
def test_a_run_ends_with_the_line_of_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(tmp_path / "bin", monkeypatch, 4)
    recipe = tmp_path / "recipe.json"
    recipe.write_text(on_gpus(tmp_path).model_dump_json())
    code, line = run(tmp_path, "up", str(recipe))
    assert code == 1 and "cannot use this GPU: Torch not compiled with CUDA" in line, line


@pytest.mark.parametrize(
    ("named", "has_gpu", "is_cpu"),
    [
        ("", True, True),
        ("-1", True, True),
        ("-1,0", True, True),
        (None, False, True),
        (None, True, False),
        ("0", False, False),
        ("GPU-8f1c,1", False, False),
    ],
)
def test_a_process_computes_on_the_cpu_if_it_was_given_no_gpu(
    named: str | None, has_gpu: bool, is_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the variable does not say so, it is given what the host, or the container, has."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    (tmp_path / "nvidiactl").touch()
    if has_gpu:
        (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(device, "DEVICE_FILES", tmp_path)
    if is_cpu:
        assert device.own_device() == torch.device("cpu")
    else:
        with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES=(0|GPU-8f1c): torch "):
            device.own_device()


OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com/ "
    "Alternatively, go to: https://pytorch.org to install a PyTorch version that has been compiled "
    "with your version of the CUDA driver."
)
NO_KERNEL = (
    "CUDA error: no kernel image is available for execution on the device\nSearch for "
    "`cudaErrorNoKernelImageForDevice' in https://docs.nvidia.com/cuda/ for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call"
)


@pytest.mark.parametrize(
    ("error", "reason", "remedy"),
    [
        (OLD_DRIVER, "too old (found version 12020); ", "update the driver, or install torch"),
        (NO_KERNEL, "execution on the device; ", "install torch for this GPU (README"),
        (
            "No CUDA GPUs are available",
            "No CUDA GPUs are available; ",
            "name GPUs that `nvidia-smi -L`",
        ),
        (
            "CUDA error: invalid device ordinal",
            "device ordinal; ",
            "name GPUs that `nvidia-smi -L` lists",
        ),
        ("Found no NVIDIA driver on your system. Please check", "on your system; ", "see whether"),
        ("CUDA driver error: operation not supported", "supported; ", "set PYTORCH_ALLOC_CONF=exp"),
        (
            "Unexpected error. Error 802: system not yet initialized",
            "ized; ",
            "see whether `nvidia-smi`",
        ),
    ],
)
def test_what_cuda_says_has_a_remedy_in_one_line(
    error: str, reason: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    line = str(device.unusable_gpu(1, RuntimeError(error)))
    assert line.startswith(f"CUDA_VISIBLE_DEVICES=1: torch {torch.__version__} cannot use this GPU")
    assert reason + remedy in line
    assert "\n" not in line and len(line) < 480 and "Please" not in line


@pytest.mark.slow
def test_doctor_tries_each_gpu_and_gives_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compared the name of the build, and reported "ok 8" where the driver was too old."""
    with_gpus(tmp_path / "bin", monkeypatch, 2)
    said = CliRunner().invoke(app, ["doctor", "--runs", str(tmp_path / "runs")])
    lines = [line for line in said.stdout.splitlines() if " gpus " in line]
    reason = REFUSED.removeprefix("CUDA_VISIBLE_DEVICES=3: ")
    assert said.exit_code == 1
    assert lines == [f"fault    gpus         GPU {number}: {reason}" for number in range(2)]


@pytest.mark.slow
def test_doctor_tries_the_gpu_that_the_variable_names_without_the_driver_s_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f1c")
    [finding] = gpu_findings()
    assert finding.state == "fault" and finding.found.startswith("GPU GPU-8f1c: torch ")


def test_doctor_reports_a_driver_that_does_not_list_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with that error alone, and reported nothing else."""
    with_gpus(tmp_path / "bin", monkeypatch, 1)
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    [finding] = gpu_findings()
    assert finding.state == "fault" and "does not list the GPUs" in finding.found


SHOW = """
import os, typer
from digenrl.commands.cli import run_command
app = typer.Typer()
@app.command()
def show():
    for name in ("CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        print(os.environ.get(name))
run_command(app)
"""


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, ["PCI_BUS_ID", "expandable_segments:True", "None"]),
        (
            {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
            ["FASTEST_FIRST", "max_split_size_mb:64", "None"],
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
            ["PCI_BUS_ID", "None", "backend:cudaMallocAsync"],
        ),
    ],
)
def test_every_command_and_its_children_count_gpus_as_the_driver_does(
    own: dict[str, str], expected: list[str]
) -> None:
    kept = {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k and "CUDA_D" not in k}
    shown = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**kept, **own}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout.split() == expected
