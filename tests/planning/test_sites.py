"""`digenrl plan --site`: what devices behind a line bring."""

import json
from functools import cache

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.planning.plan import plan
from digenrl.planning.sites import SiteAdvice, parse_sites, sample_bytes
from services.scheduler.costs.profile import load_profile
from services.scheduler.sim.sites import Site, SiteUse
from shared.errors import UserError
from shared.recipe.recipe import load_recipe
from tests.paths import RECIPES

QWEN = load_profile("qwen-image")
FORM = "NAME:KIND=COUNT@UP/DOWN,RTTms in Mbit/s, e.g. lab:a100=16@100/100,40ms"
LAB = "lab:a100=16@100/50,40ms"


def test_a_site_is_read() -> None:
    lab = Site(name="lab", kind="A100", count=16, up=12.5e6, down=6.25e6, delay=0.02)
    hall = Site(name="hall-2", kind="4090", count=8, up=187_500, down=12.5e6, delay=0.005)
    desk = Site(name="Desk", kind="4090", count=1, up=62_500, down=125_000, delay=0.001)
    texts = [
        " lab : a100=16 @ 100 / 50 , 40 ms", "hall-2:4090x4*2@1.5/100,10ms",
        "Desk:4090=1@.5/1.,2 MS",
    ]  # fmt: skip
    assert parse_sites(texts, QWEN) == [lab, hall, desk]


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        (["lab"], f"--site: 'lab' is not {FORM}"),
        (["lab:a100=16@100,40ms"], f"--site: 'lab:a100=16@100,40ms' is not {FORM}"),
        (["lab:a100=16@100/100,40"], f"--site: 'lab:a100=16@100/100,40' is not {FORM}"),
        (
            ["my lab:a100=16@100/100,40ms"],
            "--site: 'my lab' is not a name; use 1 to 64 letters, digits, '-' and '_', "
            "starting with a letter or digit",
        ),
        (
            ["home:a100=16@100/100,40ms"],
            "--site: home is given twice (--devices and --hosts are at home); give each site a "
            "name of its own",
        ),
        ([LAB, LAB], "--site: lab is given twice; give each site a name of its own"),
        (
            ["lab:a100=4,h100=4@100/100,40ms"],
            "--site: lab has several kinds; give each kind as a site",
        ),
        (
            ["lab:a100=0@100/100,40ms"],
            "--site: 'a100=0': the count is a whole number, 1 or more, or the memory, e.g. 32GiB",
        ),
    ],
)
def test_a_bad_site_is_refused_with_the_remedy(texts: list[str], line: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_sites(texts, QWEN)
    assert str(refusal.value) == line


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "1e400", "", "fast", "9" * 400])
def test_a_rate_or_a_round_trip_that_is_none_is_refused(rate: str) -> None:
    for what, text in {
        "rate": f"lab:a100=16@{rate}/100,40ms",
        " rate": f"lab:a100=16@100/{rate},40ms",
        "round trip": f"lab:a100=16@100/100,{rate}ms",
    }.items():
        with pytest.raises(UserError) as refusal:
            parse_sites([text], QWEN)
        words = f"the {what.strip()} {rate!r} is not a decimal number above 0; give {FORM}"
        assert str(refusal.value) == f"--site: {text!r}: {words}"


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"--site: qwen-image knows no v100 \(did you mean H100\?\)"
    ):
        parse_sites(["lab:v100=2@100/100,40ms"], QWEN)


def test_a_sample_s_bytes_are_its_states_and_half_of_its_pixels() -> None:
    recipe = load_recipe(RECIPES / "qwen-image.toml")
    assert recipe.sampling.state_dtype == "bfloat16"
    assert sample_bytes(recipe) == 3 * 16 * 64 * 64 * 2 + 3 * 512 * 512 // 2
    whole = load_recipe(
        RECIPES / "qwen-image.toml", {"sampling.state_dtype": "float32", "rollout.media": "raw"}
    )
    assert sample_bytes(whole) == 3 * 16 * 64 * 64 * 4 + 3 * 512 * 512


def test_long_steps_and_fast_lines_are_shown_as_plain_numbers() -> None:
    desk = Site(name="desk", kind="4090", count=1, up=125e9, down=125e6, delay=0.02)
    advice = SiteAdvice(desk, SiteUse(1.465e9, 2e8, 128.0, 1.0), "", 3262.4, 5891.0)
    assert str(advice) == (
        "site desk: 1 4090 behind 1000000/1000 Mbit/s, 40 ms, generate 128 samples and train; "
        "in a step 1,465 MB leave and 200 MB come; 3262 s/step, 5891 without it"
    )


def test_a_plan_says_what_a_site_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("digenrl.planning.plan.plan", cache(plan))  # asked for twice
    words = ["plan", str(RECIPES / "qwen-image.toml"), "--devices", "h100=1"]
    words += ["--site", "lab:h100=3@1000/1000,40ms"]
    shown, found = (
        CliRunner().invoke(app, [*words, *more], catch_exceptions=False).output
        for more in ((), ("--json",))
    )
    [site] = json.loads(found)["sites"]
    lab = site["site"]
    assert (lab["name"], lab["kind"], lab["count"]) == ("lab", "H100", 3)
    assert (lab["up"], lab["down"], lab["delay"]) == (125e6, 125e6, 0.02)
    assert 150 < site["per_step"]["samples"] <= 512
    assert site["per_step"]["down"] >= 1.6e9, "a version, or sums"
    assert site["step_seconds"] < 0.7 * site["seconds_without"]
    assert "site lab: 3 H100 behind 1000/1000 Mbit/s, 40 ms, generate" in shown
    assert f"{site['step_seconds']:.0f} s/step, {site['seconds_without']:.0f} without it" in shown


def test_a_site_needs_a_recipe_and_devices_that_hold_the_model() -> None:
    pool = ("--devices", "h100=1", "--site", "lab:mine=4GiB*2@100/100,40ms")
    for words, line in {
        ("--profile", "qwen-image"): "--site: give a recipe, from which the bytes",
        (str(RECIPES / "qwen-image.toml"),): "--site: lab: qwen-image needs",
    }.items():
        refusal = CliRunner().invoke(app, ["plan", *words, *pool]).exception
        assert isinstance(refusal, UserError) and str(refusal).startswith(line)
