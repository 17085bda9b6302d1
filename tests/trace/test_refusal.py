"""What was traced decides which cards will do: by arithmetic on a trace of HunyuanVideo."""

from pathlib import Path

import pytest

from digenrl.planning.forecast import Forecast, forecast
from digenrl.planning.runnable import HOST_GPUS
from digenrl.trace.memory import DECODING_PEAK, MEMORY_SHARE
from digenrl.trace.output import lines
from digenrl.trace.record import GIB, Trace
from shared.errors import UserError
from shared.recipe.recipe import load_recipe, override
from tests.paths import RECIPES

TRACE = Trace.model_validate_json((Path(__file__).parent / "hunyuanvideo.json").read_text())
RECIPE = load_recipe(RECIPES / "hunyuanvideo.toml")


def forecast_on(devices: str, found: Trace = TRACE) -> Forecast:
    return forecast(RECIPE, devices, None, host_gpus=HOST_GPUS, timing=False, trace=found)


def test_what_fits_is_told_by_what_was_traced() -> None:
    found = forecast_on("h100=8")
    weights = TRACE.weights
    held = weights.network + weights.decoder + 5 * weights.trained
    needed = found.needed["fluid"]
    assert needed.held * GIB == pytest.approx(held)
    assert needed.peak * GIB == pytest.approx(
        weights.trained + DECODING_PEAK * TRACE.decode.peak_bytes
    )
    assert needed.total < MEMORY_SHARE * found.profile.devices["H100"].memory_gib
    assert found.profile.variant.rho == pytest.approx(TRACE.rho)


def test_what_does_not_fit_is_refused_in_one_line_with_what_would() -> None:
    with pytest.raises(UserError) as refused:
        forecast_on("l40s=8")
    (line,) = str(refused.value).splitlines()
    assert "L40S has 44 GiB; it would take " in line and "model.vae_tiling = true" in line


def test_eight_percent_of_a_card_stay_free() -> None:
    card = 79 * GIB
    here = round(forecast_on("h100=8").needed["fluid"].total * GIB)
    for share, fits in ((0.91, True), (0.93, False)):
        peak = TRACE.decode.peak_bytes + round((share * card - here) / DECODING_PEAK)
        decode = TRACE.decode.model_copy(update={"peak_bytes": peak})
        found = TRACE.model_copy(update={"decode": decode})
        if fits:
            forecast_on("h100=8", found)
        else:
            with pytest.raises(UserError, match="92%"):
                forecast_on("h100=8", found)


def test_tiles_are_advised_where_they_help() -> None:
    sizes = {"schedule.fragment_size": 1, "trainer.devices": 1, "rollout.workers": 1}
    recipe = override(RECIPE, sizes)
    with pytest.raises(UserError, match=r"GiB with model.vae_tiling = true$"):
        forecast(recipe, "h100=1,l40s=1", None, host_gpus=HOST_GPUS, timing=False, trace=TRACE)


def test_a_trace_is_a_table_of_five_rows() -> None:
    rows = list(lines(TRACE, RECIPE))
    assert [row.split("  ")[0] for row in rows] == [
        "held, GiB", "beyond it, GiB", "TFLOP", "launches", "stored, GB",
    ]  # fmt: skip
    assert "decoding 1 sample" in rows[1] and "in float32" in rows[2]
    smaller = override(RECIPE, {"run.steps": 1})
    batch, run = ("per batch ", "per run ")
    told = list(lines(TRACE, smaller))[4]
    assert told.split(batch)[1].split(",")[0] == told.split(run)[1]
