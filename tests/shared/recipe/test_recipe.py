"""A recipe that is wrong says where and what to do, in one line."""

from pathlib import Path

import pytest

from shared.errors import UserError
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS, ROOT
from tests.shared.recipe.recipes import changed, fault


def test_the_demo_recipe_is_read_with_its_paths_made_absolute() -> None:
    recipe = load_recipe(DIGITS)
    assert recipe.model.folder == ROOT / "models" / "digits"
    assert recipe.data.prompts.is_absolute()


def test_a_resolved_recipe_can_be_read_back(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    path = tmp_path / "recipe.json"
    path.write_text(recipe.model_dump_json())
    assert load_recipe(path) == recipe


def test_a_base_in_another_folder_reads_the_files_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "mine" / "recipe.toml"
    path.parent.mkdir()
    (tmp_path / "there").symlink_to(ROOT)
    path.write_text('base = "../there/bench/learning/digits.toml"\n[run]\nname = "mine"')
    recipe, base = load_recipe(path), load_recipe(DIGITS)
    assert recipe.run.name == "mine"
    assert recipe.model_copy(update={"run": base.run}) == base


def test_a_base_in_another_folder_may_name_what_the_hosts_folder_of_models_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.setenv("DIGENRL_MODELS", str(tmp_path / "models"))
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "base.toml").write_text(f'base = "{DIGITS}"\n[model]\nfolder = "mine"')
    path = tmp_path / "recipe.toml"
    path.write_text('base = "below/base.toml"')
    assert load_recipe(path).model.folder == tmp_path / "models" / "mine"
    (tmp_path / "below" / "mine").mkdir()
    assert load_recipe(path).model.folder == tmp_path / "below" / "mine"


def test_what_a_recipe_says_itself_is_beside_it_whatever_its_base(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "base.toml").write_text(
        f'base = "{DIGITS}"\n[data]\nprompts = "p.txt"\n'
        '[[evaluation.scorers]]\nname = "gold"\ntype = "clip-score"\nfolder = "clip"'
    )
    path = tmp_path / "recipe.toml"
    path.write_text('base = "below/base.toml"\n[model]\nfolder = "model"')
    recipe = load_recipe(path)
    assert recipe.model.folder == tmp_path / "model"
    assert recipe.data.prompts == tmp_path / "below" / "p.txt"
    assert recipe.evaluation.scorers[0].folder == tmp_path / "below" / "clip"
    assert recipe.evaluation.digits == load_recipe(DIGITS).evaluation.digits


def test_fragments_that_do_not_fill_a_group_name_the_nearest_that_do(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    text = DIGITS.read_text()
    recipe = load_recipe(DIGITS)
    path.write_text(
        text.replace(f"group_size = {recipe.batch.group_size}", "group_size = 24").replace(
            f"fragment_size = {recipe.schedule.fragment_size}", "fragment_size = 7"
        )
    )
    message = fault(path)
    assert "schedule.fragment_size: 7 does not divide batch.group_size (24)" in message
    assert message.endswith("nearest that do: 6 and 8")


def test_micro_batches_that_do_not_fill_a_group_name_the_nearest_that_do(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    path = changed(tmp_path, f"micro_batch = {recipe.trainer.micro_batch}", "micro_batch = 5")
    message = fault(path)
    assert "trainer.micro_batch: 5 does not divide batch.group_size" in message
    assert "nearest that do" in message


def test_a_window_that_reaches_the_last_step_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    path = changed(tmp_path, f"window = {recipe.sampling.window}", "window = 10")
    assert "window" in fault(path)


def test_a_value_of_the_wrong_type_is_shown(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    path = changed(tmp_path, f"steps = {recipe.run.steps}", 'steps = "many"')
    message = fault(path)
    assert "run.steps" in message and "'many'" in message


def test_a_name_that_would_leave_its_folder_is_refused(tmp_path: Path) -> None:
    assert "run.name" in fault(changed(tmp_path, 'name = "digits"', 'name = "../digits"'))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    recipe = load_recipe(DIGITS)
    path = changed(tmp_path, f"groups = {recipe.batch.groups}", "")
    assert "batch.groups: missing" in fault(path)


@pytest.mark.parametrize("text", ["[run", "\x00", "run = 1"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    assert str(path) in fault(path, lines=10 if text == "run = 1" else 1)


def test_all_errors_of_a_recipe_are_named_at_once(tmp_path: Path) -> None:
    """An empty recipe took eight rounds, one error at a time."""
    path = tmp_path / "recipe.toml"
    path.write_text("")
    assert [line.removeprefix(f"{path}: ") for line in fault(path, lines=11).splitlines()] == [
        f"{key}: missing; it has no default"
        for key in (
            "run.name", "run.steps", "model.folder", "model.height", "model.width", "data.prompts",
            "sampling.window", "batch.groups", "batch.group_size", "trainer.learning_rate",
            "reward.scorers",
        )
    ]  # fmt: skip
    path.write_text(
        f'base = "{DIGITS}"\n[trainer]\nlearning_rte = 1e-3\nweight_decay = "x"\n'
        '[run]\nsteps = 0\n[[reward.scorers]]\nname = "a"\ntyp = "ocr"\n'
    )
    faults = [line.removeprefix(f"{path}: ") for line in fault(path, lines=4).splitlines()]
    assert [line.split(",")[0] for line in faults] == [
        "trainer.learning_rte: unknown key; did you mean learning_rate?",
        "reward.scorers.a.typ: unknown key; did you mean type?",
        "run.steps: input should be greater than 0",
        "trainer.weight_decay: input should be a valid number",
    ]
    path.write_text(f'base = "{DIGITS}"\n[trainer]\nupdates = 3\n[schedule]\ntag = 90\n')
    faults = [line.removeprefix(f"{path}: ") for line in fault(path, lines=2).splitlines()]
    assert faults == [
        "schedule.tag: 90 is more than batch.groups; at most 10",
        "trainer.updates: 3 does not divide batch.groups (10); nearest that do: 1 and 2",
    ]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "cannot read the recipe" in fault(tmp_path / "nowhere.toml")
    assert fault(tmp_path / "flux1-dev.12g").endswith("; did you mean flux1-dev.12gb.toml?")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[reward.scorers]", "reward.scorers: write [[reward.scorers]], not {'name'"),
        ("[model]\nfolder = my-model\n[reward.scorers]", "column 10); put a text in quotes"),
        ('[[reward.scorers]]\ntype = "pyton"\nsource = "a.py"', "has one, not 'pyton'"),
    ],
)
def test_a_mistake_of_toml_is_told_with_its_remedy(tmp_path: Path, wrong: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "{DIGITS}"\n{wrong}\nname = "mine"\n')
    assert said in fault(path)


def test_a_key_set_anew_is_checked_as_if_it_stood_in_the_file() -> None:
    recipe = load_recipe(DIGITS)
    assert override(recipe, {"run.steps": 5, "run.name": None}).run.steps == 5
    with pytest.raises(UserError, match=r"run\.steps"):
        override(recipe, {"run.steps": 0})
