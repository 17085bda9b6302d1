"""Every key of a recipe as an option: it means what the same value means in the file."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, JsonValue

from shared.errors import UserError
from shared.recipe.dataset import Dataset
from shared.recipe.files import merged, read_layers
from shared.recipe.keys import ANY, Key, find_key, recipe_keys
from shared.recipe.options import put_options, read_options
from shared.recipe.recipe import Recipe, load_recipe
from tests.paths import DIGITS

KEYS = {name: key for name, key in recipe_keys(Recipe).items() if key.field is not None}
SCORER = "proxy"
TEXTS = ("abc", "5", "1e-4", "true", "two words", "é", "a,b", "[1]", "a=b")
NUMBERS = (1, 3, 40, 0, -2)
FRACTIONS = (0.25, 1e-4, 1.5, 3.0, -1.0)


def values(kind: Any) -> list[Any]:
    """Return values of a type as TOML has them, some of them out of the key's range."""
    inner = [each for each in get_args(kind) if each not in (type(None), ...)]
    match get_origin(kind):
        case None:
            return [{"model": "m", "highest": 5.0}] if kind not in OF_TYPE else list(OF_TYPE[kind])
        case origin if origin is Annotated:
            return values(inner[0])
        case origin if origin is Literal:
            return inner
        case origin if origin is dict:
            return [{"temperature": 0.5, "max_tokens": 3, "stop": ["a", "b"]}]
        case origin if origin is tuple:
            return lists(kind, inner)
    return [value for each in inner for value in values(each)]


def lists(kind: Any, inner: list[Any]) -> list[Any]:
    if get_args(kind)[-1] is not ...:
        return [[*each] for each in zip(*map(values, inner), strict=True)]
    if isinstance(inner[0], type) and issubclass(inner[0], BaseModel):
        return [[{"name": "other", "type": "jpeg", "weight": 0.5}]]
    items = values(inner[0])
    return [items[:1], items[:3], items]


OF_TYPE: dict[Any, tuple[Any, ...]] = {
    bool: (True, False), int: NUMBERS, float: FRACTIONS, str: TEXTS, Path: ("/nowhere/at/all",),
    JsonValue: (1,), Dataset: ({"id": "org/name", "split": "test"},),
}  # fmt: skip


def of_key(key: Key) -> list[Any]:
    assert key.field is not None
    return values(key.field.annotation)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def typed(value: Any) -> str:
    """Return a value as one types it after an option."""
    return value if isinstance(value, str) else toml(value)


def in_file(folder: Path, given: dict[str, Any]) -> Path:
    """Write a recipe whose tables have these values; those of a scorer in a list of its own."""
    lines, scorers = [f"base = {toml(str(DIGITS))}"], merged(read_layers(DIGITS))["reward"]
    own: dict[str, dict[str, Any]] = {"reward": dict(scorers["scorers"][0]), "evaluation": {}}
    for name, value in given.items():
        parts = name.split(".")
        if ANY not in parts:
            lines.append(f"{name} = {toml(value)}")
            continue
        *inner, last = parts[3:]
        table = own[parts[0]]
        for part in inner:
            table = table.setdefault(part, {})
        table[last] = value
    if any(ANY in name for name in given):
        own["reward"]["folder"] = str(DIGITS.parent / own["reward"]["folder"])
        lines.append(f"reward.scorers = {toml([own['reward']])}")
    path = folder / "recipe.toml"
    path.write_text("\n".join(lines))
    return path


def outcome(path: Path, options: dict[str, Any]) -> Recipe | str:
    try:
        return load_recipe(path, options)
    except UserError as error:
        fault = str(error).removeprefix(f"{path}: ").removeprefix("--")
        return fault.partition(":")[0]


def check_same(folder: Path, given: dict[str, Any]) -> None:
    options = read_options(
        Recipe, [(name.replace(ANY, SCORER), typed(value)) for name, value in given.items()], folder
    )
    assert outcome(DIGITS, options) == outcome(in_file(folder, given), {}), given


SINGLE = [name for name in KEYS if not name.startswith("evaluation.scorers.")]


def test_each_key_is_the_same_as_in_the_file(tmp_path: Path) -> None:
    assert len(KEYS) > 100
    for number, name in enumerate(SINGLE):
        known = of_key(KEYS[name])
        check_same(tmp_path, {name: known[number % len(known)]})


@pytest.mark.slow
def test_each_value_of_each_key_is_the_same_as_in_the_file(tmp_path: Path) -> None:
    for name in SINGLE:
        for value in of_key(KEYS[name]):
            check_same(tmp_path, {name: value})


@settings(max_examples=10)
@given(data=st.data())
def test_several_keys_together_are_the_same_as_in_the_file(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = data.draw(st.lists(st.sampled_from(SINGLE), min_size=2, max_size=8, unique=True))
    names = [name for name in names if f"{name}.{ANY}" not in " ".join(names)]
    names = [name for name in names if not any(name.startswith(f"{each}.") for each in names)]
    chosen = {name: data.draw(st.sampled_from(of_key(KEYS[name]))) for name in names}
    if "reward.scorers" in chosen:
        chosen = {name: value for name, value in chosen.items() if ANY not in name}
    check_same(tmp_path_factory.mktemp("given"), chosen)


TYPOS = {
    "trainer.learnig_rate": "trainer.learning_rate",
    "trainer.lr": "trainer.learning_rate",
    "trainr.learning_rate": "trainer.learning_rate",
    "learning_rate": "trainer.learning_rate",
    "train.learning-rate": "trainer.learning_rate",
    "batch.group": "batch.groups",
    "batch.groupsize": "batch.group_size",
    "trainer.group_size": "batch.group_size",
    "groupsize": "batch.group_size",
    "model.hight": "model.height",
    "model.rank": "model.lora.rank",
    "lora.rank": "model.lora.rank",
    "lora.alpha": "model.lora.alpha",
    "run.step": "run.steps",
    "sampling.step": "sampling.steps",
    "sampling.noise": "sampling.noise_level",
    "algorithm.clip": "algorithm.clip_range",
    "algorithm.kl": "algorithm.kl_beta",
    "schedule.staleness": "schedule.max_staleness",
    "rollout.worker": "rollout.workers",
    "reward.scorers.ocr.wieght": "reward.scorers.NAME.weight",
    "reward.scorer": "reward.scorers",
    "schedule.fragmentsize": "schedule.fragment_size",
    "trainer.mircobatch": "trainer.micro_batch",
    "model.path": "model.folder",
    "model.model_id": "model.id",
    "model.guidance_scale": "model.guidance",
    "sampling.cfg": "model.guidance",
    "lora.r": "model.lora.rank",
    "model.lora.target_modules": "model.lora.targets",
    "trainer.ema_decay": "trainer.ema",
    "model.precision": "model.dtype",
    "sampling.num_inference_steps": "sampling.steps",
    "data.prompt_file": "data.prompts",
    "reward.weight": "reward.scorers.NAME.weight",
    "evaluation.promts": "evaluation.prompts",
    "data.dataset.splits": "data.dataset.split",
}


@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
def test_a_typo_names_the_key_that_was_meant(typo: str, meant: str) -> None:
    with pytest.raises(
        UserError, match=rf"^--{typo}: no key of a recipe; did you mean --{meant}[?]$"
    ):
        read_options(Recipe, [(typo, "1")], DIGITS.parent)


def test_a_key_that_is_like_no_other_is_said_to_be_none() -> None:
    with pytest.raises(UserError, match=r"^--zzz[.]qqq: no key of a recipe; `digenrl recipe keys`"):
        read_options(Recipe, [("zzz.qqq", "1")], DIGITS.parent)


def test_a_key_in_the_wrong_table_of_a_file_names_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'base = "{DIGITS}"\ntrainer.group_size = 3')
    with pytest.raises(UserError, match=r"trainer[.]group_size: .* did you mean batch.group_size"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("model.guidance_scale = 4", "guidance"),
        ("model.lora.r = 4", "rank"),
        ("[lora]\nrank = 4", "model.lora"),
        ("trainer.lr = 1e-4", "trainer.learning_rate"),
        ("algorithm.clip_rnage = 1e-4", "clip_range"),
        ("model.lora.rnak = 16", "rank"),
        ("[trianer]\nlearning_rate = 1e-4", "trainer"),
        ('[[reward.scorers]]\nname = "a"\ntyp = "ocr"', "type"),
    ],
)
def test_a_typo_in_a_file_names_the_key_that_was_meant(
    line: str, meant: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'base = "{DIGITS}"\n{line}\n')
    with pytest.raises(UserError, match=rf"recipe.toml: .*: unknown key; did you mean {meant}[?]$"):
        load_recipe(path)


@pytest.mark.parametrize("name", ["trainer.max_grad_norm", "model.lora.alpha", "sampling.shift"])
def test_a_number_that_a_stored_recipe_could_not_hold_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"^--{name}: input should be a finite number, not inf$"):
        one(name, "inf")


def test_a_fault_of_a_scorer_is_said_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--reward.scorers.proxy.function: use the name of a Py"):
        one("reward.scorers.proxy.function", "1")
    path = tmp_path / "recipe.toml"
    path.write_text(f'base = "{DIGITS}"\n[[reward.scorers]]\nname = "mine"\ntype = "python"')
    with pytest.raises(UserError, match=r"reward.scorers.mine.source: missing; name your file"):
        load_recipe(path)


@pytest.mark.parametrize("name", ["model.id", "data.dataset.id"])
def test_a_name_that_the_hub_does_not_have_is_refused_in_words(name: str) -> None:
    address = "https://huggingface.co/org/name"
    with pytest.raises(UserError, match=rf"^--{name}: use the owner and the name on the hub, org"):
        one(name, address)


def test_a_recipe_may_begin_with_the_mark_of_its_encoding(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'base = "{DIGITS}"', encoding="utf-8-sig")
    assert load_recipe(path) == load_recipe(DIGITS)


def test_files_with_keys_are_relative_to_the_recipe_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    scorers = [
        'name = "r"\ntype = "remote"\nurl = "http://x"\nremote = {key_file = "key"}',
        'name = "j"\ntype = "judge"\nurl = "http://x"\njudge = {model = "m", key_file = "key"}',
    ]
    tables = "".join(f"[[reward.scorers]]\n{each}\n" for each in scorers)
    (tmp_path / "recipe.toml").write_text(f'base = "{DIGITS}"\n{tables}')
    based = tmp_path / "below" / "recipe.toml"
    based.write_text('base = "../recipe.toml"')
    remote, judge = load_recipe(based).reward.scorers
    assert judge.judge is not None
    assert remote.remote.key_file == judge.judge.key_file == tmp_path / "key"


def test_a_path_may_begin_at_the_home_of_who_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "recipe.toml").write_text(
        f'base = "{DIGITS}"\n[data]\nprompts = "~/mine.txt"'
    )
    based = tmp_path / "recipe.toml"
    based.write_text('base = "below/recipe.toml"')
    assert load_recipe(based).data.prompts == tmp_path / "me" / "mine.txt"
    assert one("data.prompts", "~/mine.txt").data.prompts == tmp_path / "me" / "mine.txt"


def test_a_base_that_is_not_there_is_named_with_the_file_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('base = "nowhere.toml"')
    with pytest.raises(UserError, match=r"recipe.toml: base: there is no file .*nowhere.toml"):
        load_recipe(path)


def one(name: str, text: str | None, folder: Path = DIGITS.parent) -> Recipe:
    return load_recipe(DIGITS, read_options(Recipe, [(name, text)], folder))


def test_paths_of_options_begin_at_the_folder_that_is_given(tmp_path: Path) -> None:
    assert one("data.prompts", "mine.txt", tmp_path).data.prompts == tmp_path / "mine.txt"
    listed = '[{name = "a", type = "aesthetic", folder = "weights"}]'
    [scorer] = one("reward.scorers", listed, tmp_path).reward.scorers
    assert scorer.folder == tmp_path / "weights"


def test_texts_stand_for_what_the_key_takes() -> None:
    assert one("model.lora.targets", "attn.to_q, attn.to_k").model.lora.targets == (
        "attn.to_q", "attn.to_k",
    )  # fmt: skip
    assert one("trainer.decay_steps", "none").trainer.decay_steps is None
    assert one("trainer.deterministic", None).trainer.deterministic
    assert one("sampling.sigmas", "shifted").sampling.sigmas == "shifted"
    assert one("batch.group-size", "48").batch.group_size == 48
    with pytest.raises(UserError, match=r"^--batch.groups: needs a value$"):
        one("batch.groups", None)
    with pytest.raises(UserError, match=r"^--batch.groups: input should be a valid integer.*'two'"):
        one("batch.groups", "two")
    with pytest.raises(UserError, match=r"reward.scorers has no ocr; it has proxy"):
        one("reward.scorers.ocr.weight", "2")


def test_an_option_implies_what_the_same_key_implies_in_a_file() -> None:
    assert one("algorithm.name", "cps").sampling.variant == "cps"


def test_an_option_takes_away_what_excludes_it_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'base = "{DIGITS}"\n[[reward.scorers]]\nname = "r"\ntype = "remote"\nurl = "http://x"\n'
        'remote = {key_env = "KEY"}\n'
    )
    options = read_options(Recipe, [("reward.scorers.r.remote.key_file", "key")], tmp_path)
    [scorer] = load_recipe(path, options).reward.scorers
    assert (scorer.remote.key_env, scorer.remote.key_file) == (None, tmp_path / "key")


def test_of_a_table_that_an_option_excludes_only_what_options_say_is_left(tmp_path: Path) -> None:
    adapter = ("model.adapter", "sft")
    for typed, left in {
        (adapter, ("model.lora.rank", "8")): {"rank": 8},
        (("model.lora.rank", "8"), ("model.lora.alpha", "2"), adapter): {"rank": 8, "alpha": 2.0},
        (adapter,): None,
    }.items():
        options = read_options(Recipe, typed, tmp_path)
        tables = put_options(merged(read_layers(DIGITS)), options)
        assert tables["model"].get("lora") == left


def test_yaml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("run:\n  name: x\n")
    with pytest.raises(UserError, match=r"recipe.yaml: YAML is not read; write the recipe as TOML"):
        load_recipe(path)


def test_names_in_a_list_are_those_of_its_tables() -> None:
    found = find_key(Recipe, "reward.scorers.my-ocr.key-env")
    assert found is None
    found = find_key(Recipe, "reward.scorers.my-ocr.judge.key-env")
    assert found is not None
    assert found[0] == ("reward", "scorers", "my-ocr", "judge", "key_env")
