"""A run of the demo, reproduced from its record: the same bytes, or the step and the reason."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import DIGITS

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = (
    "--run.steps 2 --batch.groups 2 --evaluation.samples_per_prompt 1 --evaluation.digits none "
    "--trainer.deterministic"
)


def digenrl(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "digenrl", *words], cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_a_run_is_reproduced_to_the_byte_and_a_planted_difference_is_named(tmp_path: Path) -> None:
    first = digenrl(tmp_path, "up", str(DIGITS), *SMALL.split())
    assert first.returncode == 0, first.stdout + first.stderr
    again = digenrl(tmp_path, "reproduce", "runs/digits")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "has the weights of runs/digits in each of 3 versions" in again.stdout
    planted = digenrl(tmp_path, "reproduce", "runs/digits", "--algorithm.kl_beta", "0.5")
    assert planted.returncode == 1, planted.stdout + planted.stderr
    assert "first differs from runs/digits at step" in planted.stdout
    assert "because algorithm.kl_beta was 1.0, and is 0.5" in planted.stdout
