"""A local run that goes on after its checkout was moved."""

import shutil
from pathlib import Path

import pytest

from digenrl.local.checking.preflight import LocalRun, UpRequest, prepare
from shared.errors import UserError
from tests.paths import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for folder in ("recipes", "models"):
        shutil.copytree(ROOT / folder, tmp_path / "old" / folder)
    return tmp_path / "old"


def prepared(checkout: Path, *, resume: bool) -> LocalRun:
    recipe, runs = checkout / "recipes" / "digits.toml", checkout.parent / "runs"
    local = prepare(UpRequest(recipe, {}, resume=resume, port=0, runs=runs))
    local.lock.close()
    return local


def test_a_run_goes_on_from_a_checkout_that_was_moved(checkout: Path) -> None:
    prepared(checkout, resume=False)
    moved = checkout.rename(checkout.with_name("new"))
    assert prepared(moved, resume=True).recipe.model.folder == moved / "models" / "digits"


def test_a_run_does_not_go_on_with_another_model_in_the_same_place(checkout: Path) -> None:
    prepared(checkout, resume=False)
    config = checkout / "models" / "digits" / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(UserError, match=r"model\.folder: .* has the digest"):
        prepared(checkout, resume=True)
