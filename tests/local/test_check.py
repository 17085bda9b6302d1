"""Every recipe that we ship can run; broken ones are told why in one line."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from digenrl.commands.cli import app
from digenrl.local.checking.check import check
from digenrl.planning.forecast import better_keys
from shared.errors import UserError
from shared.recipe.recipe import load_recipe, override
from tests.paths import RECIPES

MODELS = ("sd35-medium", "flux1-dev", "qwen-image", "wan2.1-14b", "hunyuanvideo")
ON_32 = ("flux1-dev", "wan2.1-14b", "hunyuanvideo")
IN_ONE_SIZE = ("sd35-large", "wan2.1-1.3b", "wan2.2-a14b")
OF_12_GB = (
    "sd35-medium", "flux1-dev", "qwen-image", "wan2.1-1.3b", "z-image", "flux2-klein-4b",
)  # fmt: skip
CARDS = {
    **{f"{model}.12gb": "4070=1" for model in OF_12_GB},
    "hunyuanvideo.48gb": "l40s=8",
    "wan2.1-14b.480p": "h100=8",
    "wan2.1-14b.720p": "h100=8",
}
REWARD_CARDS = {"hunyuanvideo.48gb": 1}
"""Cards that only a reward's network is on."""
BY_TRACE = {
    "flux1-kontext": 8,
    "flux2-dev": 8,
    "flux2-klein-4b": 4,
    "hunyuanvideo-1.5": 8,
    "ltx-2": 8,
    "qwen-image-edit": 8,
    "wan2.1-i2v-14b": 8,
    "z-image": 4,
}
"""Recipes of models whose cost profile is made of a trace, and their GPUs of 80 GB."""
SHIPPED = [
    *(f"{model}{size}" for model in MODELS for size in ("", ".1-gpu", ".mixed")),
    *(f"{model}.32-gpu" for model in ON_32),
    *IN_ONE_SIZE,
    *CARDS,
    *BY_TRACE,
]
PUBLISHED = [f"published/{path.stem}" for path in (RECIPES / "published").glob("*.toml")]
SIZES = {".12gb": 1, ".1-gpu": 1, ".mixed": 24, ".32-gpu": 32, "": 8}


def test_there_are_recipes_for_every_model_and_size() -> None:
    found = {path.stem for path in RECIPES.glob("*.toml")}
    demos = {"digits", "digits-edit", "digits-fluid", "digits-my-reward", "digits-nft"}
    assert found == {*SHIPPED, *demos}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_passes(path: Path) -> None:
    is_demo = path.stem.startswith("digits")
    said = check(path, elsewhere=not is_demo).lines
    assert said[0].startswith(f"{path}: ")
    assert is_demo or "are on other hosts" in said[1]


def test_steps_from_which_nothing_is_learned_are_named() -> None:
    def lines(steps: int) -> str:
        return "\n".join(check(RECIPES / "digits.toml", options={"run.steps": steps}).lines)

    assert "trainer.decay_steps: the learning rate is 0 after 26 of 27 steps" in lines(27)
    assert "decay_steps" not in lines(26)


@pytest.mark.parametrize("name", SHIPPED)
def test_weights_that_are_not_here_are_no_reason_to_be_content(name: str) -> None:
    with pytest.raises(UserError, match=r"model\.folder: .* does not exist.*--elsewhere"):
        check(RECIPES / f"{name}.toml")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_s_devices_are_those_that_it_says(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    devices = recipe.rollout.workers + recipe.trainer.devices
    size = next(size for size in SIZES if name.endswith(size))
    assert devices + REWARD_CARDS.get(name, 0) == BY_TRACE.get(name, SIZES[size])


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_is_for_fluid_devices(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    assert recipe.schedule.mode == ("disaggregated" if recipe.trainer.is_sharded else "fluid")


@pytest.mark.parametrize("name", SHIPPED)
def test_states_of_trajectories_are_bfloat16(name: str) -> None:
    assert load_recipe(RECIPES / f"{name}.toml").sampling.state_dtype == "bfloat16"


CARDS_OF_80 = {"": "h100=8", ".1-gpu": "h100=1", ".32-gpu": "h100=32"}
CARDS_OF_48 = "h100=8,l40s=16"


def stated_devices(name: str) -> str:
    if name in CARDS:
        return CARDS[name]
    if name in BY_TRACE:
        return f"h100={BY_TRACE[name]}"
    model = next(model for model in (*MODELS, *IN_ONE_SIZE) if name.startswith(model))
    size = name.removeprefix(model)
    return CARDS_OF_48 if size == ".mixed" else CARDS_OF_80[size]


@pytest.mark.parametrize("name", SHIPPED)
def test_what_a_recipe_holds_and_its_peak_fit_the_cards_that_it_is_for(name: str) -> None:
    path, devices = RECIPES / f"{name}.toml", stated_devices(name)
    found = check(path, devices, elsewhere=True, timing=False).forecast
    assert found is not None
    recipe, split = load_recipe(path), found.own.split
    trained = recipe.trainer.devices
    assert sum(split.devices.values()) == recipe.rollout.workers + trained
    generate = f"generate{'_streamed' * (recipe.holding.memory == 'streamed')}"
    encode = {"encode"} if recipe.encoder.workers else set()
    train = "fluid" if recipe.schedule.mode == "fluid" else "train"
    assert set(found.needed) == ({generate, train} if split.rollout else {train}) | encode
    for need in found.needs:
        assert need.pool or need.role == "encode"
        for kind in need.pool:
            assert need.needed.total <= 0.92 * found.profile.devices[kind].memory_gib


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHIPPED, *PUBLISHED])
def test_every_recipe_has_a_step_time_on_the_devices_that_it_names(name: str) -> None:
    path, devices = RECIPES / f"{name}.toml", None
    if name in PUBLISHED:
        recipe = load_recipe(path)
        devices = f"h100={recipe.rollout.workers + recipe.trainer.devices}"
    found = check(path, devices or stated_devices(name), elsewhere=True).forecast
    assert found is not None and found.simulated is not None
    assert 1 < found.simulated.step_seconds < 10_000  # 81 frames at 720p take 8,242


def test_eight_cards_of_48_gb_hold_what_eight_of_80_gb_do_with_the_keys_that_are_named() -> None:
    """The recipe for small cards differs from that for large ones by what a refusal names."""
    with pytest.raises(UserError, match=r"it would take \S+ GiB with model\.vae_tiling = true"):
        check(RECIPES / "hunyuanvideo.toml", "l40s=8", elsewhere=True)
    assert check(RECIPES / "hunyuanvideo.48gb.toml", "l40s=8", elsewhere=True, timing=False).lines


NEEDED = {
    "qwen-image": ' GiB with rollout.memory = "streamed"',
    "hunyuanvideo": " GiB with model.vae_tiling = true",
}


@pytest.mark.parametrize("model", NEEDED)
def test_cards_of_48_gb_are_refused_in_one_line_with_what_makes_the_model_fit(
    model: str, tmp_path: Path
) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(
        f'base = "{RECIPES / f"{model}.toml"}"\n[trainer]\ndevices = 8\n[rollout]\nworkers = 16\n'
        "[schedule]\nmax_staleness = 1"
    )
    with pytest.raises(UserError) as refused:
        check(path, CARDS_OF_48, elsewhere=True)
    line = str(refused.value)
    assert line.startswith("rollout.workers: 16 are to generate; ")
    assert "L40S has 44 GiB; it would take " in line and "\n" not in line
    assert line.endswith(NEEDED[model])


def test_workers_that_stream_though_the_recipe_does_not_are_said_by_an_option(
    tmp_path: Path,
) -> None:
    path, cards = tmp_path / "streams.toml", "h100=8,4090=16"
    path.write_text(f'base = "{RECIPES / "flux1-dev.toml"}"\nrollout.workers = 16')
    with pytest.raises(UserError, match=r'rollout\.memory = "streamed"'):
        check(path, cards, elsewhere=True)
    found = check(path, cards, elsewhere=True, streamed="4090", timing=False).forecast
    assert found is not None and found.own.split.rollout == {"4090": 16}
    assert found.needed["generate_streamed"].host > 22
    with pytest.raises(UserError, match="--streamed: 'l40s' is not among H100, 4090"):
        check(path, cards, elsewhere=True, streamed="l40s")


def test_memory_is_what_was_traced_with_the_decoder_in_float32() -> None:
    """Resident figures are those of full-size traces, the decoder twice as large and its peak. That
    counts 1.6 times. Another process has the text encoders."""
    found = check(RECIPES / "hunyuanvideo.toml", "h100=8", elsewhere=True, timing=False).forecast
    assert found is not None
    needed = found.needed["fluid"]
    assert needed.held == pytest.approx(24.75 + 0.46 + 4 * 0.41, abs=0.05)  # and two sums
    assert needed.peak == pytest.approx(0.41 + 1.6 * 2 * 8.52, rel=0.01)


ROLES = 'schedule.mode = "disaggregated"\nrollout.workers = 4\ntrainer.devices = 4'


@pytest.mark.slow
def test_the_recipe_s_own_split_is_forecast_and_a_faster_one_named(tmp_path: Path) -> None:
    path = tmp_path / "even.toml"
    path.write_text(f'base = "{RECIPES / "sd35-medium.toml"}"\n{ROLES}')
    checked = check(path, "h100=8", elsewhere=True)
    found = checked.forecast
    assert found is not None and found.simulated is not None and found.better is not None
    assert "generating 4 H100, training 4 H100" in checked.lines[2]
    assert found.better.step_seconds < 0.97 * found.simulated.step_seconds
    keys = better_keys(found)
    assert keys["rollout.workers"] + keys["trainer.devices"] == 8
    assert f"rollout.workers = {keys['rollout.workers']}, " in checked.lines[3]
    assert override(load_recipe(path), keys).rollout.workers == keys["rollout.workers"]


@pytest.mark.parametrize(
    ("devices", "host_gpus", "said"),
    [
        ("h100=4", 8, "--devices: 4 H100 are 4; the recipe wants 8: "),
        ("4090=8", 8, "GiB on a device that generates and trains; 4090 has 23 GiB"),
        ("h100", 8, "--devices: "),
        ("b300=8", 8, "knows no b300"),
    ],
)
def test_devices_that_will_not_do_are_refused(
    devices: str, host_gpus: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "even.toml"
    path.write_text(f'base = "{RECIPES / "wan2.1-14b.toml"}"\n{ROLES}')
    with pytest.raises(UserError) as refused:
        check(path, devices, elsewhere=True, host_gpus=host_gpus)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_the_fastest_of_several_kinds_train(tmp_path: Path) -> None:
    path = tmp_path / "mixed.toml"
    path.write_text(
        f'base = "{RECIPES / "flux1-dev.toml"}"\n'
        'schedule.mode = "disaggregated"\nrollout.workers = 5\ntrainer.devices = 3'
    )
    found = check(path, "a100=4,h100=2,l40s=2", elsewhere=True, timing=False).forecast
    assert found is not None
    assert found.own.split.trainer == {"H100": 2, "A100": 1}
    assert found.own.split.rollout == {"A100": 3, "L40S": 2}


def test_a_reward_that_is_not_installed_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "reads.toml"
    (tmp_path / "three.csv").write_text("prompt,digit,text\na three,3,3\n")
    path.write_text(
        f'base = "{RECIPES / "digits.toml"}"\ndata.prompts = "three.csv"\n'
        '[[evaluation.scorers]]\nname = "gold"\ntype = "ocr"'
    )
    assert check(path).lines
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(UserError, match=r'gold\.type: ocr needs the extra "ocr"; .*rapidfuzz'):
        check(path)
    assert "are on other hosts" in check(path, elsewhere=True).lines[1]


def test_all_weights_are_counted_in_float32(tmp_path: Path) -> None:
    path = tmp_path / "full.toml"
    path.write_text(
        f'base = "{RECIPES / "sd35-medium.toml"}"\n{ROLES}\n'
        '[model]\ntrained = "full"\ndtype = "float32"\n[algorithm]\nkl_beta = 0.0\n'
        "[encoder]\nworkers = 1"
    )
    found = check(path, "h100=8", elsewhere=True, timing=False).forecast
    assert found is not None
    network = 2 * 4.6
    assert found.needed["generate"].network == pytest.approx(network)
    assert found.needed["generate"].trained == pytest.approx(network), "the version that is next"
    assert found.needed["train"].total > 4 * network


BROKEN = {
    "a key that nobody knows": ("window = 3", "windw = 3", "did you mean window?"),
    "no arithmetic": ('mode = "fluid"', 'mode = "fluid"\nfragment_size = 7', "6 and 8"),
    "a window too long": ("window = 3", "window = 9", "window: 9 steps from step 0 reach past"),
    "another algorithm": ('name = "cps"', 'name = "csp"', "algorithm.name: "),
    "another transition": (
        "noise_level = 0.8",
        'variant = "flow"',
        "sampling.variant: cps does not",
    ),
    "no such reward": ('type = "ocr"', 'type = "orc"', "no scorer is called 'orc'"),
    "no prompts": ("prompts/signs.txt", "prompts/sings.txt", "sings.txt cannot be read"),
    "no devices that generate": ('"fluid"', '"disaggregated"', "rollout.workers: 0 needs"),
    "no size": ("height = 512", "height = 0", "model.height: "),
    "no TOML": ("[batch]", "[batch", "not TOML"),
    "a base that is not there": ("[run]", 'base = "nowhere.toml"\n[run]', "base: there is no file"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_recipe_gives_one_clear_line(broken: str, tmp_path: Path) -> None:
    old, new, said = BROKEN[broken]
    text = (RECIPES / "flux1-dev.toml").read_text().replace('"prompts/', f'"{RECIPES}/prompts/')
    assert old in text
    path = tmp_path / "broken.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as raised:
        check(path, elsewhere=True)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_recipe_that_is_based_on_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ring.toml"
    path.write_text('base = "ring.toml"')
    with pytest.raises(UserError, match=r"is it a ring\?"):
        check(path)


def test_json_says_what_was_found_and_what_was_wrong(tmp_path: Path) -> None:
    def run(*words: str) -> Result:
        return CliRunner().invoke(app, ["check", *words, "--json"])

    recipe = str(RECIPES / "wan2.1-14b.1-gpu.toml")
    good = json.loads(run(recipe, "--elsewhere", "--devices", "h100=1").stdout)
    assert good["ok"] and good["recipe"] == recipe
    assert good["forecast"]["trainer"] == {"H100": 1}
    assert 0.9 < good["forecast"]["utilisation"] < 1
    assert good["forecast"]["memory_gib"]["fluid"]["total"] < 79
    bad = run(recipe, "--devices", "h100=1")
    assert isinstance(bad.exception, UserError)
    assert json.loads(bad.stdout) == {"recipe": recipe, "ok": False, "error": str(bad.exception)}


def test_activations_that_are_kept_are_said_to_be_in_no_figure(tmp_path: Path) -> None:
    path = tmp_path / "kept.toml"
    base = f'base = "{RECIPES / "sd35-medium.toml"}"\n[trainer]\ngradient_checkpointing = '
    for keeps in (False, True):
        path.write_text(base + str(not keeps).lower())
        said = check(path, "h100=8", elsewhere=True, timing=False).lines
        assert any("gradient_checkpointing = true" in line for line in said) == keeps


def test_a_shard_group_may_be_on_several_hosts_and_is_of_one_kind() -> None:
    path = RECIPES / "published" / "mix-grpo.flux1-dev.toml"
    found = check(path, "h100=32", elsewhere=True, timing=False).forecast
    assert found is not None and found.own.split.trainer == {"H100": 12}
    found = check(path, "h100=8,a100=28", elsewhere=True, timing=False).forecast
    assert found is not None and found.own.split.trainer == {"A100": 12}
    with pytest.raises(UserError, match=r"^trainer\.shard_devices: 12 of one kind form a group"):
        check(path, "h100=11,a100=11,h200=11", elsewhere=True, timing=False)
