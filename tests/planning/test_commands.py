"""``digenrl plan`` as it is typed."""

import json
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.devices import parse_devices
from digenrl.commands.cli import app
from digenrl.planning.output import alike_hosts
from digenrl.planning.plan import plan
from services.scheduler.costs.profile import load_profile
from shared.errors import UserError
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS, RECIPES

QWEN = load_profile("qwen-image")


SIZE = ", or the memory, e.g. 32GiB"
NOR = ", nor hosts, e.g. h100x8*2+a100x8*2"


def _run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def _refusal(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, UserError)
    (line,) = str(result.exception).splitlines()
    return line


def test_kinds_are_written_as_one_likes() -> None:
    assert parse_devices("--devices", "h100=16, A100=2", QWEN) == {"H100": 16, "A100": 2}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("h100:16", "--devices: 'h100:16' is not kind=count, e.g. h100=16,a100=16" + NOR),
        ("", "--devices: '' is not kind=count, e.g. h100=16,a100=16" + NOR),
        ("h100=many", "--devices: 'h100=many': the count is a whole number, 1 or more" + SIZE),
        ("h100=0", "--devices: 'h100=0': the count is a whole number, 1 or more" + SIZE),
        ("h100=-2", "--devices: 'h100=-2': the count is a whole number, 1 or more" + SIZE),
        ("v100=2", "--devices: qwen-image knows no v100 (did you mean H100?); known are H100, "
         "H200, A100, H20, L40S, 4090, 5090, 3090, 4070, A6000, L40, B200, RTX-PRO-6000, and any "
         "other by its memory, e.g. v100=32GiB*4"),
        ("h100=1,H100=2", "--devices: H100 is given twice; add the counts"),
        ("h100=5000", "--devices: more than 4096 devices; plan for a part of them"),
    ],
)  # fmt: skip
def test_bad_devices_are_refused_in_one_line(text: str, line: str) -> None:
    assert _refusal("plan", "--profile", "qwen-image", "--devices", text) == line


def test_other_bad_input_is_refused_in_one_line() -> None:
    for words, start in {
        ("plan", "--devices", "h100=2"): "give a recipe, or --profile; known are flux1-dev",
        ("plan", "--devices", "h100=2", "--profile", "sdxl"): "no cost profile sdxl; known are",
        ("plan", "no.toml", "--devices", "h100=2"): "cannot read the recipe no.toml",
        ("plan", str(DIGITS), "--devices", "h100=2"): "--profile: no cost profile fits the network",
    }.items():
        assert _refusal(*words).startswith(start)


def test_one_device_generates_and_trains_by_turns() -> None:
    found = json.loads(_run("plan", "--profile", "qwen-image", "--devices", "h100=1", "--json"))
    assert {choice["recipe"]["schedule.mode"] for choice in found["choices"]} == {"fluid"}
    assert all(choice["trainer"] == {"H100": 1} for choice in found["choices"])


def test_a_plan_in_a_table_and_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("digenrl.planning.plan.plan", cache(plan))  # asked for twice
    words = ("plan", "--profile", "qwen-image", "--devices", "h100=3", "--host-gpus", "3")
    table = _run(*words)
    found = json.loads(_run(*words, "--json"))
    assert found["host_gpus"] == 3
    for choice in found["choices"]:
        assert choice["recipe"]["rollout.workers"] == choice["rollout"].get("H100", 0)
        assert choice["recipe"]["trainer.devices"] == choice["trainer"]["H100"]
        assert choice["recipe"]["schedule.fragment_size"] == choice["fragment_size"]
    assert found["devices"] == {"H100": 3}
    assert found["left_out"] == []
    assert "encodes prompts" in found["reasons"][0], "so that more rows of a pass fit"
    best = found["choices"][0]
    assert f"{best['trainer']['H100']} H100" in table
    assert "to write into a recipe, in the same order:" in table
    keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in best["recipe"].items())
    assert keys in table
    assert best["rollout"].get("H100", 0) + best["trainer"]["H100"] == 3
    assert best["utilisation"] == pytest.approx(
        found["bound_seconds"] / best["step_seconds"], abs=1e-3
    )


@pytest.mark.slow
def test_small_cards_generate_with_what_they_need() -> None:
    words = ("plan", "--profile", "flux1-dev", "--devices", "h100=1,4090=2")
    shown = _run(*words)
    assert "4090 generates with 4.3 GiB" in shown and "22.2 GiB of its host's memory" in shown
    assert 'encoder.workers = 1, rollout.memory = "streamed"' in shown
    found = json.loads(_run(*words, "--json"))
    assert found["excluded"] == {}
    for choice in found["choices"]:
        assert choice["rollout"]["4090"] == 2
        streamed = {"4090": {"DIGENRL_ROLLOUT_MEMORY": "streamed"}}
        only_small = set(choice["rollout"]) == {"4090"}
        assert choice["environment"] == ({} if only_small else streamed)
        assert (choice["recipe"].get("rollout.memory") == "streamed") == only_small


@pytest.mark.slow
def test_a_recipe_gives_the_batch_and_its_fixed_choices(tmp_path: Path) -> None:
    changes = {
        "schedule.tag": "off", "schedule.fragment_size": 2, "schedule.max_staleness": 0,
        "trainer.deterministic": False,
    }  # fmt: skip
    fixed = override(load_recipe(DIGITS), changes)
    recipe = tmp_path / "fixed.json"
    recipe.write_text(fixed.model_dump_json())
    words = ("plan", str(recipe), "--profile", "flux1-dev", "--devices", "h100=3", "--json")
    found = json.loads(_run(*words))
    assert found["shape"]["groups"] == fixed.batch.groups
    assert found["shape"]["trained_steps"] == fixed.sampling.window
    assert {choice["fragment_size"] for choice in found["choices"]} == {2}
    assert {choice["tag_groups"] for choice in found["choices"]} == {0}
    assert {choice["max_staleness"] for choice in found["choices"]} == {0}
    ahead = json.loads(_run(*words, "--staleness", "1"))["choices"]
    assert {choice["max_staleness"] for choice in ahead} == {1}


def test_hosts_with_one_command_are_one_line() -> None:
    given = [("a-1", "x"), ("a-2", "y"), ("a-3", "y"), ("a-4", "y"), ("b-1", "x"), ("b-2", "x")]
    wanted = [("a-1", "x"), ("each of a-2 to a-4", "y"), ("b-1", "x"), ("b-2", "x")]
    assert list(alike_hosts(given)) == wanted


@pytest.mark.slow
def test_a_plan_says_when_the_scheduler_itself_is_busy_for_much_of_a_step() -> None:
    words = ("plan", str(RECIPES / "flux1-dev.toml"), "--staleness", "0")
    many = _run(*words, "--hosts", "h100x8*512", "--batch.groups", "4096")
    assert "the scheduler itself takes about" in many
    assert "the scheduler itself" not in _run(*words, "--hosts", "h100x8*4")
