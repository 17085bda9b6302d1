"""LoRA files that `digenrl adapter convert` refuses in one line."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from digenrl.commands import cli
from tests.reports.test_lora_files import TEXT, Tensors, pair

ERRORS: dict[str, tuple[Tensors, list[str], str]] = {
    "no IN": ({}, ["none.safetensors", "o.safetensors"], "IN: .* does not exist"),
    "OUT is there": (TEXT, ["a.safetensors", "a.safetensors"], "OUT: .* already exists; choose"),
    "OUT's name": (TEXT, ["a.safetensors", "o.bin"], "OUT: .* has to be a .safetensors file"),
    "a text encoder": (
        pair("x", 2, (4, 4)) | TEXT, ["a.safetensors", "o.safetensors"], "add --drop text-encoder",
    ),
    "nothing else": (
        TEXT, ["a.safetensors", "o.safetensors", "--drop", "text-encoder"], "no tensors of a netw",
    ),
    "several ranks": (
        pair("x", 2, (4, 4)) | pair("y", 3, (4, 4)), ["a.safetensors", "o.safetensors"],
        "--rank: the layers have the ranks 2, 3; name one, such as 3, which keeps all",
    ),
    "two names": (
        pair("pipe.dit.x", 2, (4, 4)) | pair("diffusion_model.x", 2, (4, 4)),
        ["a.safetensors", "o.safetensors"], "adapts pipe.dit.x twice, under two names",
    ),
    "DoRA": (
        pair("x", 2, (4, 4)) | {"x.dora_scale": torch.ones(4)}, ["a.safetensors", "o.safetensors"],
        "x.dora_scale, which is no part of a plain LoRA",
    ),
    "NaN": (
        {name: each * float("nan") for name, each in pair("x", 2, (4, 4)).items()},
        ["a.safetensors", "o.safetensors", "--rank", "1"], "numbers that are not finite: x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_converted_is_one_line_and_nothing_is_written(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, words, said = ERRORS[case]
    monkeypatch.chdir(tmp_path)
    save_file(tensors, "a.safetensors")
    before = Path("a.safetensors").read_bytes()
    monkeypatch.setattr("sys.argv", ["digenrl", "adapter", "convert", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert re.search(said, error), error
    assert [each.name for each in tmp_path.iterdir()] == ["a.safetensors"]
    assert Path("a.safetensors").read_bytes() == before
