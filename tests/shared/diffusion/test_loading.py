"""Networks that are read into their place are those that diffusers loads."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from shared.diffusion.families.sd3 import StableDiffusion3
from shared.diffusion.loading.models import load_model
from shared.diffusion.loading.network import (
    Place,
    StoredTensor,
    build_network,
    fill,
    find_tensors,
    load_networks,
    materialize,
    stored_tensors,
)
from shared.errors import UserError
from shared.models.families import FAMILIES
from tests import tiny_models
from tests.paths import ROOT

CPU = torch.device("cpu")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline's folder whose network lies in several files."""
    made: Path = tmp_path_factory.mktemp("tiny") / request.param
    network = tiny_models.build(request.param).transformer
    network.save_pretrained(made / "transformer", max_shard_size="40KB")
    return made


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    network = build_network(folder / "transformer", dtype)
    assert all(each.is_meta for each in network.parameters())
    load_networks(folder, {"transformer": network}, network, Place(CPU))
    return network


def theirs(folder: Path, dtype: torch.dtype) -> Any:
    config = json.loads((folder / "transformer" / "config.json").read_text())
    return getattr(diffusers, config["_class_name"]).from_pretrained(
        folder / "transformer", dtype=dtype, local_files_only=True
    )


def everything(network: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers, and tensors that are neither."""
    found = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    for name, module in network.named_modules():
        plain = {key: each for key, each in vars(module).items() if isinstance(each, Tensor)}
        found |= {f"{name}.{key}": each for key, each in plain.items()}
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_network_is_equal_to_the_one_that_diffusers_loads(
    folder: Path, dtype: torch.dtype
) -> None:
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 1
    mine, wanted = loaded(folder, dtype), theirs(folder, dtype)
    assert type(mine) is type(wanted)
    found, expected = everything(mine), everything(wanted)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert dict(mine.config) | {"_name_or_path": ""} == dict(wanted.config) | {"_name_or_path": ""}
    assert not mine.training
    assert not any(each.requires_grad for each in mine.parameters())


def test_a_weight_that_has_two_names_is_read_under_either(tmp_path: Path) -> None:
    stored = one_file(tmp_path, {"first": torch.arange(6.0).reshape(2, 3)})
    tied = torch.zeros(2, 3)
    fill({"first": tied, "second": tied}, stored)
    assert torch.equal(tied, torch.arange(6.0).reshape(2, 3))


def test_names_of_an_earlier_release_of_diffusers_are_known(tmp_path: Path) -> None:
    from diffusers.models.attention_processor import Attention

    class Old(diffusers.ModelMixin, diffusers.ConfigMixin):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(8, heads=2, dim_head=4)
            self.attention._from_deprecated_attn_block = True

    network, wanted = Old(), Old()
    named = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = dict(wanted.state_dict())
    for new, old in named.items():
        for name in [each for each in tensors if f".{new}." in each]:
            tensors[name.replace(new, old)] = tensors.pop(name)
    one_file(tmp_path / "transformer", tensors)
    load_networks(tmp_path, {"transformer": network}, network, Place(CPU))
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(stored_tensors(network)[name], tensor), name


def one_file(folder: Path, tensors: dict[str, Tensor]) -> dict[str, StoredTensor]:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "diffusion_pytorch_model.safetensors")
    return find_tensors(folder)


def test_weights_are_read_in_pieces_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.diffusion.loading.network.PIECE_BYTES", 16)
    wanted = {"a": torch.randn(5, 7), "b": torch.randn(3).double(), "c": torch.tensor(2.0)}
    stored, sizes = one_file(tmp_path, wanted), list[int]()
    targets = {name: torch.zeros(tensor.shape) for name, tensor in wanted.items()}
    fill(targets, stored, sizes.append)
    assert all(torch.equal(targets[name], wanted[name].float()) for name in wanted)
    assert max(sizes) <= 16
    assert sum(sizes) == 5 * 7 * 4 + 3 * 8 + 4


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"b": torch.zeros(2)}, "hold no a"),
        ({"a": torch.zeros(3)}, r"a of .* has the shape \[3\], the network's \[2\]"),
    ],
)
def test_weights_of_another_network_are_refused(
    tmp_path: Path, tensors: dict[str, Tensor], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        fill({"a": torch.zeros(2)}, one_file(tmp_path, tensors))


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    stored = one_file(tmp_path, {"a": torch.zeros(1000)})
    file = stored["a"].file
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="ends too early"):
        fill({"a": torch.zeros(1000)}, stored)


def test_what_has_values_already_keeps_them() -> None:
    network = nn.Linear(2, 3)
    network.register_buffer("table", torch.ones(4), persistent=False)
    network.weight = nn.Parameter(network.weight.detach().to("meta"))
    bias = network.bias.detach().clone()
    materialize(network, CPU)
    assert not network.weight.is_meta
    assert torch.equal(network.bias, bias)
    assert torch.equal(network.get_buffer("table"), torch.ones(4))


def test_a_part_whose_weights_are_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    """The check of a folder refuses it too, but what loads must not rely on who has checked."""
    folder = tiny_models.save("sd3", tmp_path / "sd3")
    vae = folder / "vae"
    [weights] = vae.glob("*.safetensors")
    torch.save(safetensors.torch.load_file(weights), vae / "diffusion_pytorch_model.bin")
    weights.unlink()
    spec = FAMILIES["StableDiffusion3Pipeline"]
    with pytest.raises(UserError, match="safetensors"):
        StableDiffusion3.load(
            folder, spec, {"decoder"}, device=CPU, dtype=torch.float32, text_tokens=8
        )


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a diffusers model"):
        load_model(tmp_path, {"transformer"}, device=CPU, dtype=torch.float32)
    (tmp_path / "model_index.json").write_text('{"_class_name": "KandinskyPipeline"}')
    with pytest.raises(UserError, match=r"supported are: .*StableDiffusion3Pipeline"):
        load_model(tmp_path, {"transformer"}, device=CPU, dtype=torch.float32)
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    with pytest.raises(UserError, match="cannot load"):
        load_model(tmp_path, {"transformer"}, device=CPU, dtype=torch.float32)


def test_without_its_decoder_a_model_does_not_guess_its_latent_shape() -> None:
    trainer = load_model(
        ROOT / "models" / "digits", {"transformer"}, device=CPU, dtype=torch.float32
    )
    with pytest.raises(ValueError, match="decoder"):
        trainer.latent_shape(height=8, width=8)
