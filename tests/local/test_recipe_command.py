"""Keys of a recipe as options of commands, and what `digenrl recipe` shows of them."""

import contextlib
import io
import json
import sys
from pathlib import Path
from unittest import mock

import pytest

from digenrl.commands import cli
from digenrl.local.checking import preflight
from digenrl.local.checking.preflight import UpRequest, prepare
from digenrl.local.start import STARTED_JSON
from tests.paths import DIGITS


def typed(*words: str) -> tuple[int, str, str]:
    """Run the command in this process: exit code, output and errors."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["digenrl", *words]),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture
def based(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(f'base = "{DIGITS}"\nbatch.groups = 4\n')
    return path


def test_a_recipe_is_shown_with_where_each_value_comes_from(based: Path) -> None:
    options = ("--run.seed", "3", "--reward.scorers.proxy.weight=2", "--trainer.deterministic")
    code, out, _ = typed("recipe", "show", str(based), "--json", *options)
    found = {each["key"]: each for each in json.loads(out)}

    def source(key: str) -> tuple[object, str, str | None]:
        return found[key]["value"], found[key]["source"], found[key]["file"]

    assert code == 0
    assert source("run.seed") == (3, "option", None)
    assert source("trainer.deterministic") == (True, "option", None)
    assert source("batch.groups") == (4, "file", str(based))
    assert source("batch.group_size") == (24, "base", str(DIGITS))
    assert source("sampling.variant") == ("flow", "implied", None)
    assert source("run.keep_last") == (3, "default", None)
    assert source("reward.scorers.proxy.weight") == (2.0, "option", None)
    assert source("reward.scorers.proxy.type")[1:] == ("base", str(DIGITS))
    assert source("reward.scorers.proxy.patience")[1:] == ("default", None)


def test_a_recipe_is_shown_in_lines(based: Path) -> None:
    code, out, _ = typed("recipe", "show", str(based), "--batch.group_size", "48")
    lines = {line.split()[0]: line.split() for line in out.splitlines()}
    assert code == 0
    assert lines["batch.group_size"] == ["batch.group_size", "48", "option"]
    assert lines["trainer.ema"] == ["trainer.ema", "none", "default"]
    assert lines["batch.groups"][2] == str(based)


def test_the_keys_are_listed_with_their_defaults() -> None:
    code, out, _ = typed("recipe", "keys", "trainer.")
    assert code == 0
    assert ["--trainer.learning_rate", "required"] in [line.split() for line in out.splitlines()]
    assert ["--trainer.updates", "1"] in [line.split() for line in out.splitlines()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("up", "r.toml", "--trainer.lr", "1"), "--trainer.lr: no key of a recipe; did you mean"),
        (("recipe", "keys", "nonsense"), "WORD: no key has 'nonsense' in its name"),
        (("check", "r.toml", "--lr", "1"), "--lr (Possible options: --help, --trainer.le"),
        (("up", "r.toml", "--seed", "1", "--run.seed", "2"), "--run.seed: is given twice, as 2 "),
        (("up", "r.toml", "--batch.groups"), "--batch.groups: needs a value"),
        (("plan", "--batch.groups", "2"), "--batch.groups: a recipe key needs a recipe; name one"),
        (("serve", "reward", "--run", "x", "--batch.groups", "2"), "workers take the recipe from"),
    ],
)
def test_options_that_are_refused(words: tuple[str, ...], said: str) -> None:
    code, _, err = typed(*words)
    assert code == 2
    assert said in " ".join(err.split())


def test_options_reach_the_run_and_are_recorded_in_it(
    based: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[UpRequest] = []

    def stop(request: UpRequest) -> None:
        requests.append(request)
        raise SystemExit

    monkeypatch.setattr(preflight, "prepare", stop)
    typed("up", str(based), "--seed", "5", "--batch.groups", "8", "--runs", str(tmp_path / "runs"))
    monkeypatch.undo()
    local = prepare(requests[0])
    with local.lock:
        pass
    assert (local.recipe.run.seed, local.recipe.batch.groups) == (5, 8)
    started = json.loads((local.folder / STARTED_JSON).read_text())
    assert started["recipe"] == str(based)
    assert started["options"] == {"run.seed": 5, "batch.groups": 8}
    assert {"python", "torch", "diffusers"} <= started["versions"].keys()
