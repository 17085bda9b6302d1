"""Rows of the tables: each is a recipe that can be run on the hosts that it states."""

import re
from pathlib import Path
from typing import Any

import pytest

from bench.cluster.forecasts import SLOWED
from bench.cluster.request import WORKLOADS
from bench.cluster.rows import RECIPES, ROWS, SLOWLY, UNSCALED, Row, row_of, toml_of
from bench.cluster.setting import recipe_of
from bench.cluster.suite import FULL_LENGTH, QUICK_LENGTH, suite
from bench.devices import H200_HOST
from bench.stored import RESULTS
from bench.tables import Known, known_of, pages, summary, tables, utilisation, with_table
from digenrl.local.checking.check import check
from services.scheduler.costs.floor import floor_seconds
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.recipes import batch_shape
from services.scheduler.costs.seconds import denoising_seconds, pass_seconds
from shared.recipe.recipe import Recipe, load_recipe
from tests.paths import RECIPES as SHIPPED
from tests.paths import ROOT

CHECKED = "qwen-image-16-a100-16-on-policy"
"""The row that `make test` checks: members on unlike hosts."""


def test_every_recipe_is_made_from_its_row_and_every_row_has_one() -> None:
    assert sorted(RECIPES.glob("*.toml")) == sorted(row.path for row in (*ROWS, UNSCALED))
    for row in (*ROWS, UNSCALED):
        assert row.path.read_text() == toml_of(row), "python -m bench recipes"


PLACEMENT = {
    "run.name", "trainer.devices", "schedule.max_staleness", "schedule.fragment_size",
    "encoder.workers", "encoder.threads", "encoder.device", "rollout.workers",
}  # fmt: skip
"""All keys that a row may change of its shipped recipe: devices, staleness, what runs where."""


def keys_of(recipe: Recipe) -> dict[str, Any]:
    tables = recipe.model_dump()
    return {
        f"{name}.{key}": value
        for name, table in tables.items()
        for key, value in (table if isinstance(table, dict) else {"": table}).items()
    }


@pytest.mark.parametrize("row", [*ROWS, UNSCALED], ids=lambda row: row.name)
def test_a_row_is_a_shipped_recipe_on_other_devices(row: Row) -> None:
    [base] = re.findall(r'^base = "../../recipes/(.+)"$', row.path.read_text(), re.MULTILINE)
    shipped, found = keys_of(load_recipe(SHIPPED / base)), keys_of(row.recipe)
    differs = {key for key in found.keys() | shipped.keys() if found.get(key) != shipped.get(key)}
    assert differs <= PLACEMENT


def checked(row: Row) -> None:
    """Checks as a user would, on a host that has neither the model nor the rewards."""
    streamed = ",".join(row.streamed).lower() or None
    found = check(row.path, hosts=row.hosts, elsewhere=True, timing=False, streamed=streamed)
    assert found.forecast is not None
    assert found.forecast.own.split == row.split
    assert not row.recipe.trainer.is_sharded and row.recipe.schedule.mode == "fluid"


def test_a_row_on_unlike_hosts_passes_the_check_on_them() -> None:
    checked(row_of(CHECKED))


@pytest.mark.slow
@pytest.mark.parametrize("row", [*ROWS, UNSCALED], ids=lambda row: row.name)
def test_each_row_passes_the_check_on_its_hosts(row: Row) -> None:
    checked(row)


@pytest.mark.parametrize("row", [*ROWS[::5], *map(row_of, SLOWLY)], ids=lambda row: row.name)
def test_what_is_run_is_what_the_recipe_says(row: Row, tmp_path: Path) -> None:
    case = row.case(rounds=1, batches=2, one_step_batches=4)
    setting = case.setting(case.modes[0], 0)
    run, recipe = recipe_of(setting, tmp_path), row.recipe
    for table in ("batch", "algorithm", "trainer", "encoder", "schedule"):
        assert getattr(run, table) == getattr(recipe, table), table
    assert run.rollout.workers == recipe.rollout.workers == setting.num_rollout
    assert run.trainer.devices == setting.num_trainer
    shape = setting.load_profile().shape
    same = {"updates": 1, "trained_samples": 0}  # all of a group's
    assert recipe.trained_samples == recipe.batch.group_size and recipe.trainer.updates == 1
    assert shape == batch_shape(recipe).model_copy(update=same)
    assert setting.schedule.fragment_size == (8 if row.streamed else "auto")
    seconds = 7.0 if row.way == "on-policy" else 6.0
    if row.workload in ("wan", "hunyuan") and row.way == "on-policy":  # batches of minutes
        seconds *= 2
    took = floor_seconds(row.profile, row.devices) / row.scale
    if sum(row.devices.values()) == 64:  # as many stand on these cores
        seconds *= 2
    if len(row.devices) > 1 and row.way == "on-policy":
        seconds *= 2
    if row.name in SLOWLY:
        seconds *= 2
    assert took == pytest.approx(seconds, rel=0.01)


def test_the_suite_has_every_row_and_says_how_long_it_takes() -> None:
    rows, length = suite(quick=False)
    assert rows == ROWS and length == FULL_LENGTH and length.rounds == 3
    few, short = suite(quick=True)
    assert sum(short.seconds(row) for row in few) < 240 and short == QUICK_LENGTH


def known(**result: Any) -> Known:
    """Everything forecast, and one row measured."""
    forecasts = known_of(RESULTS).forecasts
    today = next(f for f in forecasts["rows"] if f["row"] == "qwen-image-32-on-policy")
    mode = {
        "mode": "on-policy", "step_seconds": 33.0, "balanced_seconds": 33.0, "fastest": 32.0,
        "slowest": 34.0, "utilisation": 0.9, "simulated_seconds": today["step_seconds"],
        "deviation": 0.03,
        "over_2026_06": 2.5, "over_tuned": 1.1, "overhead_ms": 90.0, "overhead_share": 0.01,
        **result,
    }  # fmt: skip
    return Known({"qwen-image-32-on-policy": {"modes": [mode]}}, forecasts)


def cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


def test_what_was_measured_is_upright_and_what_is_forecast_is_not() -> None:
    text = utilisation(known())
    assert cells(text, "Qwen-Image")[0] == "0.900"
    forecast = r"\*0\.\d{3}\*"
    assert re.fullmatch(forecast, cells(text, "FLUX.1-dev")[0])
    assert all(re.fullmatch(forecast, cell) for cell in cells(text, "Qwen-Image")[1:])
    assert cells(summary(known()), "Qwen-Image")[0] == "0.900"
    assert "33.0 (32.0–34.0)" in tables(known()) and "(+3.0%)" in tables(known())


def test_a_table_stands_between_its_marks_and_nowhere_else() -> None:
    page = "a\n<!-- bench: x -->\nold\n<!-- bench: end -->\nb\n<!-- bench: end -->\n"
    found = with_table(page, "x", "new\n")
    assert found == "a\n<!-- bench: x -->\nnew\n<!-- bench: end -->\nb\n<!-- bench: end -->\n"


def test_the_published_tables_are_those_of_the_published_results() -> None:
    for page, text in pages(ROOT, known_of(RESULTS)).items():
        assert page.read_text() == text, "python -m bench tables"
        assert "†" not in text and "‡" not in text


def test_an_h200_s_host_slows_the_workloads_that_are_simulated_with_it() -> None:
    for name in WORKLOADS:
        alone = load_profile(WORKLOADS[name])
        slowed = alone.model_copy(update={"host": H200_HOST})
        calls = (pass_seconds, denoising_seconds)
        assert any(call(slowed, 1) > call(alone, 1) for call in calls) == (name in SLOWED)


def test_a_row_that_was_measured_with_other_costs_is_a_forecast() -> None:
    assert cells(utilisation(known()), "Qwen-Image")[0] == "0.900"
    outdated = cells(utilisation(known(simulated_seconds=25.0)), "Qwen-Image")[0]
    assert outdated.startswith("*")
