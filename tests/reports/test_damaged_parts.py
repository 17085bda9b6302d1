"""Parts of a model that are there and damaged: refused by name before anything is sampled
(sd-scripts, OmniParser#34: hand-copied tokenizers; diffusers#8607, #8618: decoders)."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from digenrl.commands.cli import app
from shared.diffusion.loading.models import load_model
from shared.diffusion.sampling.decoding import decoded
from shared.errors import ContractError, UserError
from shared.models.catalogue import check_parts
from tests import tiny_models
from tests.reports.model_folders import change, copy_of

WHOLE: Any = {"transformer", "text", "decoder"}
CPU = torch.device("cpu")
FILES = {"transformer": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}


def load(folder: Path) -> Any:
    return load_model(folder, WHOLE, device=CPU, dtype=torch.float32)


def edit(folder: Path, part: str, change_of: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / part / f"{FILES.get(part, 'model')}.safetensors"
    tensors = load_file(file)
    change_of(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("family", ["sd3"])
def test_a_sound_model_is_accepted(family: str, tmp_path: Path) -> None:
    folder = copy_of(family, tmp_path / "model")
    check_parts(folder)
    load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", [each for each in tiny_models.MODELS if each != "sd3"])
def test_every_sound_model_is_accepted(family: str, tmp_path: Path) -> None:
    test_a_sound_model_is_accepted(family, tmp_path)


@pytest.mark.parametrize(
    ("family", "part"),
    [("flux", "tokenizer"), ("flux", "tokenizer_2"), ("sd3", "tokenizer_3"), ("wan", "tokenizer")],
)
def test_a_tokenizer_without_its_vocabulary_is_refused(
    family: str, part: str, tmp_path: Path
) -> None:
    folder = copy_of(family, tmp_path / "model")
    (folder / part / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=rf"model\.folder: .*/{part} has no vocabulary"):
        check_parts(folder)
    with pytest.raises(
        UserError, match=rf"/{part} has \d+ tokens, and its encoder \d+|cannot load"
    ):
        load(folder)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = copy_of("flux", tmp_path / "model")
    change(folder / "text_encoder_2" / "config.json", vocab_size=60)
    edit(
        folder,
        "text_encoder_2",
        lambda t: t.update({k: v[:60].clone() for k, v in t.items() if v.shape[0] == 116}),
    )
    for checks in (check_parts, load):  # before a run starts, and when the model is loaded
        with pytest.raises(UserError, match=r"/tokenizer_2 has 116 tokens, and its encoder 60; fe"):
            checks(folder)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("flux", "shift_factor", None),
        ("flux", "shift_factor", ...),
        ("sd3", "scaling_factor", None),
        ("z-image", "shift_factor", float("nan")),
        ("qwen-image", "latents_mean", None),
        ("wan", "latents_std", None),
        ("hunyuan-video", "scaling_factor", None),
    ],
)
def test_a_decoder_that_lacks_a_number_is_refused(
    family: str, key: str, value: Any, tmp_path: Path
) -> None:
    folder = copy_of(family, tmp_path / "model")
    change(folder / "vae" / "config.json", **{key: value})
    with pytest.raises(UserError, match=rf"vae/config\.json has {key} = (null|NaN), and its"):
        check_parts(folder)


def test_a_decoder_whose_tensors_do_not_fit_is_refused_by_the_tensor_s_name(tmp_path: Path) -> None:
    folder = copy_of("flux", tmp_path / "model")
    name = "decoder.conv_in.weight"
    edit(folder, "vae", lambda tensors: tensors.update({name: tensors[name][:, :-1].clone()}))
    with pytest.raises(UserError, match=rf"{re.escape(name)} of .*/vae/.* has the shape \[4, 15"):
        load(folder)
    edit(folder, "vae", lambda tensors: tensors.pop(name))
    with pytest.raises(UserError, match=rf"/vae/.*safetensors hold no {re.escape(name)}"):
        load(folder)
    change(folder / "model_index.json", vae=["diffusers", "AutoencoderTiny"])
    change(
        folder / "vae" / "config.json", _class_name="AutoencoderTiny", latent_channels=16,
        block_out_channels=[64] * 4, encoder_block_out_channels=[64] * 4, down_block_types=...,
        decoder_block_out_channels=[64] * 4, scaling_factor=1.0, shift_factor=0.0,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"/vae/.*safetensors hold no encoder\.layers"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_a_value_that_is_not_finite_is_refused_by_its_tensor(
    part: str, value: float, tmp_path: Path
) -> None:
    folder, names = copy_of("flux", tmp_path / "model"), list[str]()

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        names.append(sorted(tensors)[5])
        tensors[names[0]].view(-1)[-1] = value

    edit(folder, part, damage)
    with pytest.raises(UserError, match=rf"{re.escape(names[0])} of .*/{part} holds NaN or inf"):
        load(folder)


def test_generate_draws_no_black_pictures(tmp_path: Path) -> None:
    folder = copy_of("flux", tmp_path / "model")
    edit(folder, "transformer", lambda t: t[sorted(t)[5]].fill_(torch.nan))
    (tmp_path / "p.txt").write_text("a cat\n")
    (tmp_path / "r.toml").write_text(f"""
        run.name = "x"
        run.steps = 2
        model = {{ folder = "{folder}", device = "cpu", height = 32, width = 32 }}
        data.prompts = "p.txt"
        sampling = {{ steps = 4, window = 2 }}
        batch = {{ groups = 2, group_size = 2 }}
        trainer.learning_rate = 1e-4
        reward.scorers = [{{ name = "j", type = "jpeg-compressibility" }}]
    """)
    out = tmp_path / "out"
    given = ["generate", str(tmp_path / "r.toml"), "--prompt", "a cat", "--out", str(out)]
    found = CliRunner().invoke(app, given)
    assert isinstance(found.exception, UserError) and "/transformer holds NaN" in str(
        found.exception
    )
    assert not list(out.rglob("*.png"))


def test_latents_that_overflow_are_not_decoded_to_a_black_picture(tmp_path: Path) -> None:
    model = load(copy_of("flux", tmp_path / "model"))
    latents = torch.zeros(1, 16, 4, 4)
    latents[0, 0, 0, 0] = torch.inf
    with pytest.raises(ContractError, match="latents of a sample are not finite"):
        decoded(model, latents, CPU)
