"""A trace makes a cost profile, where a model has none."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.local.checking.check import check
from digenrl.planning.forecast import forecast
from digenrl.trace.profile import FORWARD_TFLOPS, traced_profile, write_profile
from digenrl.trace.record import Trace
from digenrl.trace.runs import trace, trace_setting
from digenrl.trace.work import count_work
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.sizes import SampleSize, forward_tflop
from shared.errors import UserError
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS, RECIPES
from tests.scheduler.costs.test_profile import numbers

FRAGMENT = 2


@pytest.fixture(scope="module")
def traced() -> Trace:
    recipe = load_recipe(DIGITS)
    setting = trace_setting(recipe, FRAGMENT)
    found = trace(recipe, setting, is_published=False, say=lambda _: None)
    return found.model_copy(update={"counted": count_work(recipe, setting)})


@pytest.mark.slow
def test_six_passes_give_the_operations_of_every_size(traced: Trace) -> None:
    height, width = 4, 8
    recipe = override(load_recipe(DIGITS), {"model.height": height, "model.width": width})
    found = trace(recipe, trace_setting(recipe, FRAGMENT), is_published=False, say=lambda _: None)
    assert traced.counted is not None
    size = SampleSize(height=height, width=width, frames=1, text_tokens=found.shape.text_tokens)
    row = found.step_flops / found.shape.forwards / 1e12
    assert forward_tflop(traced.counted.work, size) == pytest.approx(row, rel=1e-6)


@pytest.mark.slow
def test_a_model_without_a_profile_is_forecast_by_its_trace(traced: Trace, tmp_path: Path) -> None:
    recipe, path = load_recipe(DIGITS), tmp_path / "made.json"
    assert traced.counted is not None
    row = traced.step_flops / traced.shape.forwards / 1e12
    assert forward_tflop(traced.counted.work, traced.counted.work.size) == pytest.approx(row)
    full = override(recipe, {"model.trained": "full", "algorithm.kl_beta": 0.0})
    with pytest.raises(UserError, match=r"model\.trained: "):
        traced_profile(full, traced)
    found = forecast(recipe, "h100=3", None, host_gpus=8, trace=traced)
    assert found.profile.name == recipe.model.name and found.simulated is not None
    write_profile(traced_profile(recipe, traced, name="made"), path)
    plain, made = json.loads(path.read_text()), load_profile(path)
    assert made.name == "made" and made.work is not None and made.memory is not None
    expected = forward_tflop(made.work, made.work.size) / FORWARD_TFLOPS
    assert made.rollout.sample_seconds == pytest.approx(expected, rel=1e-3)
    sources = plain.pop("sources")
    assert all(any(f"{n}.".startswith(f"{key}.") for key in sources) for n in numbers(plain))
    said = check(DIGITS, "h100=3", str(path)).lines
    assert any(line.startswith("by the cost profile made: ") for line in said)


@pytest.mark.slow
def test_a_profile_is_written_by_an_option(tmp_path: Path) -> None:
    path = tmp_path / "made.json"
    options = ["--trace", "--devices", "h100=3", "--save-profile", str(path)]
    run = CliRunner().invoke(app, ["check", str(DIGITS), *options])
    assert run.exit_code == 0, run.output
    assert f"by the cost profile {load_recipe(DIGITS).model.name}: " in run.output
    assert load_profile(path).name == "made"


def test_a_profile_needs_a_trace(tmp_path: Path) -> None:
    path = str(tmp_path / "made.json")
    run = CliRunner().invoke(app, ["check", str(DIGITS), "--save-profile", path])
    assert isinstance(run.exception, UserError) and "--save-profile: " in str(run.exception)


@pytest.mark.parametrize("name", ["qwen-image-edit", "hunyuanvideo-1.5"])
def test_a_model_is_not_forecast_by_the_profile_of_one_whose_name_its_own_begins_with(
    name: str,
) -> None:
    found = check(RECIPES / f"{name}.toml", "h100=8", elsewhere=True, timing=False).forecast
    assert found is not None and found.profile.name == name
