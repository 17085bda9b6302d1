"""A whole run whose devices hold no text encoder: an encoder makes the conditions."""

from pathlib import Path

import pytest

from tests.e2e.local_run import SMALL, StartRun, recipe_of

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 5


def test_with_an_encoder_a_run_ends_with_the_same_bytes_as_without(
    start_run: StartRun, tmp_path: Path
) -> None:
    arguments = ("--steps", str(STEPS), "--deterministic")
    expected = start_run(*arguments, name="whole").finish()
    path = recipe_of(tmp_path, {**SMALL, "encoder.workers": 2, "encoder.ahead": 1})
    run = start_run(*arguments, name="encoded", recipe=path)
    run.wait_for(lambda view: view["step"] >= 1)
    encoders = [each for each in run.get("/v1/workers") if each["service"] == "encoder"]
    assert sorted(each["worker"] for each in encoders) == ["encoder-0", "encoder-1"]
    assert sum(each["num_done"] for each in encoders) >= 2 * SMALL["batch.groups"]
    assert run.get("/v1/run")["num_workers"]["encoder"] == 2
    found = run.finish()
    assert found["commits"] == expected["commits"] == STEPS
    assert found["adapter_sha256"] == expected["adapter_sha256"]
    assert found["weights_digest"] == expected["weights_digest"]
