"""A path that is no model, or half of one, is refused with what to name or do in its place."""

import shutil
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.models.catalogue import check_parts, check_weights, find_family
from shared.models.memory import read_header
from tests.paths import ROOT

DIGITS = ROOT / "models" / "digits"
COMMIT = "0123456789" * 4


def test_what_is_no_model_is_said_to_be_what_it_is(tmp_path: Path) -> None:
    file, cache = tmp_path / "flux.safetensors", tmp_path / "models--org--name"
    file.write_bytes(b"")
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for path in (snapshot, tmp_path / "whole"):
        path.mkdir(exist_ok=True)
        shutil.copy(DIGITS / "model_index.json", path)
    (tmp_path / "whole" / "vae").mkdir()
    (tmp_path / "nothing").mkdir()
    for path, said in {
        file: "is a file, and a folder .* from_single_file",
        cache: f"is a cache of the hub; name a commit in it, such as .*/{COMMIT}, or model.id",
        tmp_path / "whole" / "vae": "is one part of a model; name the whole, .*/whole",
        tmp_path: "holds one; name .*/whole",
        tmp_path / "nothing": r"\(no readable model_index.json\); name the folder that holds one",
    }.items():
        with pytest.raises(UserError, match=said):
            find_family(path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("diffusion_pytorch_model.bin", "model.bin, and safetensors alone are read; load"),
        ("diffusion_pytorch_model.fp16.safetensors", "a variant, .*fp16.safetensors; rename it"),
        ("config.txt", r"contains no transformer/\*.safetensors; copy or fetch it once more"),
    ],
)
def test_weights_of_another_kind_are_named(name: str, said: str, tmp_path: Path) -> None:
    folder = shutil.copytree(DIGITS, tmp_path / "model")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_name(name))
    with pytest.raises(UserError, match=said):
        check_weights(folder)


@pytest.mark.parametrize("part", ["tokenizer_3", "scheduler"])
def test_a_part_without_weights_that_is_not_there_is_named(part: str, tmp_path: Path) -> None:
    check_parts(DIGITS)
    folder = shutil.copytree(DIGITS, tmp_path / "model")
    shutil.rmtree(folder / part)
    with pytest.raises(UserError, match=f"contains no {part}; copy or fetch it once more"):
        check_parts(folder)


def test_weights_whose_copy_has_ended_early_are_named(tmp_path: Path) -> None:
    folder = shutil.copytree(DIGITS, tmp_path / "model")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"transformer/.* is broken off; copy or fetch it once"):
        check_weights(folder)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS; .* git lfs pull"),
        (b"<!DOCTYPE html>", "a web page; fetch it once more"),
        (b"", "it is empty"),
        (b"\x10\0\0\0\0\0\0\0{", "it is broken off; copy or fetch it once more"),
    ],
)
def test_a_file_that_was_not_fetched_whole_says_what_it_is(
    data: bytes, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(data)
    with pytest.raises(UserError, match=said):
        read_header(file)
