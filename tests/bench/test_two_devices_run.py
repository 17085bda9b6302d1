"""The bench itself: real services on two cores, batches of less than a second."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.slow, pytest.mark.timeout(300)]

TINY = {"batch.group_size": 4, "schedule.fragment_size": 4, "trainer.micro_batch": 4}


@pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)
def test_two_modes_are_measured_and_the_disaggregated_one_keeps_both_devices_busier(
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "tiny.json"
    recipe.write_text(override(load_recipe(DIGITS), TINY).model_dump_json())
    found = subprocess.run(
        [
            sys.executable, "-m", "bench", "two-devices", str(recipe), "--quick",
            "--part", "equal", "--mode", "sequential", "--mode", "+TSP",
            "--folder", str(tmp_path / "bench"), "--json", str(tmp_path / "figures.json"),
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    equal = json.loads((tmp_path / "figures.json").read_text())["parts"]["equal"]
    plain, disaggregated = equal["modes"]
    assert [len(mode["runs"][0]["batches_s"]) for mode in equal["modes"]] == [1, 2]
    gain = plain["median_s"] / disaggregated["median_s"]
    assert disaggregated["over_previous"] == pytest.approx(gain)
    work = [
        sum(share for uses in mode["runs"][0]["busy"].values() for share in uses.values())
        for mode in (plain, disaggregated)
    ]
    assert 0 < work[0] < work[1]
    assert work[0] <= 1.1  # one device after the other
    assert plain["runs"][0]["samples_generated_by_trainer"] == 0
    assert set(plain["runs"][0]["cores"]) >= {"rollout-0", "trainer-0", "nats", "bench"}
