"""Model folders as people have them, through `digenrl check`: accepted, or refused in one line that
names what to do (stable-diffusion-webui#8123, DeepSeek-V3#557, transformers#27923, diffusers)."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from digenrl.commands.cli import app
from shared.diffusion.loading.models import load_model
from shared.errors import UserError
from tests.reports.model_folders import change, copy_of

NETWORK = "transformer/diffusion_pytorch_model"
SECOND = f"{NETWORK}-00002-of-00002.safetensors"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 23802932552\n"
Change = Callable[[Path], Path | None]


def as_it_is(folder: Path) -> None:
    pass


def pointers(pattern: str) -> Change:
    def changed(folder: Path) -> None:
        for file in folder.rglob(pattern):
            file.write_text(POINTER)

    return changed


def renamed(suffix: str) -> Change:
    def changed(folder: Path) -> None:
        for file in list(folder.rglob("*.safetensors")):
            file.rename(file.with_name(file.name.replace(".safetensors", suffix)))

    return changed


def in_a_cache(folder: Path, *, broken: str = "", root: bool = False) -> Path:
    """As huggingface_hub's cache has it: links to blobs."""
    cache = folder.parent / "models--org--name"
    snapshot = cache / "snapshots" / "abc123"
    (cache / "blobs").mkdir(parents=True)
    for number, file in enumerate(each for each in sorted(folder.rglob("*")) if each.is_file()):
        blob, link = cache / "blobs" / f"{number:040d}", snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not broken or not file.match(broken):
            shutil.copy(file, blob)
        link.symlink_to(blob)
    return cache if root else snapshot


def sharded(folder: Path, *, lose: str = "", leave: bool = False) -> None:
    whole = folder / f"{NETWORK}.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    half = len(names) // 2
    for part, some in enumerate((names[:half], names[half:]), 1):
        file = folder / f"{NETWORK}-0000{part}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, file)
    stem = Path(NETWORK).name
    weight_map = {
        name: f"{stem}-0000{1 + (name in names[half:])}-of-00002.safetensors" for name in names
    }
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{NETWORK}.safetensors.index.json").write_text(json.dumps(index))
    if not leave:
        whole.unlink()
    if lose:
        (folder / lose).unlink()


def cast(part: str, dtype: torch.dtype) -> Change:
    def changed(folder: Path) -> None:
        for file in (folder / part).glob("*.safetensors"):
            save_file({name: each.to(dtype) for name, each in load_file(file).items()}, file)

    return changed


def edited(file: str, **values: Any) -> Change:
    return lambda folder: change(folder / file, **values)


def without(*names: str) -> Change:
    def changed(folder: Path) -> None:
        for each in (folder / name for name in names):
            shutil.rmtree(each) if each.is_dir() else each.unlink()

    return changed


def both(*changes: Change) -> Change:
    def changed(folder: Path) -> None:
        for each in changes:
            each(folder)

    return changed


def moved(folder: Path) -> Path:
    return folder.rename(folder.parent / "My Models (v1) \u6d4b\u8bd5")


def single(folder: Path) -> Path:
    return Path(
        shutil.copy(folder / f"{NETWORK}.safetensors", folder.parent / "flux1-dev.safetensors")
    )


def with_a_bom(folder: Path) -> None:
    index = folder / "model_index.json"
    index.write_bytes(b"\xef\xbb\xbf" + index.read_bytes())


def with_a_comma(folder: Path) -> None:
    config = folder / "transformer/config.json"
    config.write_text(config.read_text().replace("}", ",}"))


S, INDEX, NET = "scheduler/scheduler_config.json", "model_index.json", "transformer/config.json"
T5 = {"text_encoder_3": [None, None], "tokenizer_3": [None, None]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
CASES: dict[str, tuple[str, Change, str]] = {
    "as it is": ("flux", as_it_is, ""),
    "pointers of Git LFS": ("flux", pointers("*.safetensors"), "git lfs pull"),
    "one pointer of Git LFS": ("flux", pointers("vae/*.safetensors"), "git lfs pull"),
    "a variant": ("flux", renamed(".fp16.safetensors"), "rename it without the variant"),
    ".bin files": ("flux", renamed(".bin"), "safetensors alone are read"),
    "a cache": ("flux", in_a_cache, ""),
    "a cache's root": ("flux", partial(in_a_cache, root=True), "name a commit in it"),
    "a broken link": ("flux", partial(in_a_cache, broken=f"{NETWORK}.*"), "digenrl fetch"),
    "two pieces": ("flux", sharded, ""),
    "a piece is missing": ("flux", partial(sharded, lose=SECOND), "no .*00002-of"),
    "pieces and the whole": ("flux", partial(sharded, leave=True), ""),
    "nf4 network": ("flux", edited(NET, quantization_config=NF4), "quantization_config"),
    "fp8 network": ("flux", cast("transformer", torch.float8_e4m3fn), ""),
    "mixed types": ("flux", cast("text_encoder_2", torch.float16), ""),
    "a single file": ("flux", single, "from_single_file"),
    "no tokenizer": ("flux", without("tokenizer_2"), "contains no tokenizer_2"),
    "an empty tokenizer": ("flux", without("tokenizer_2/tokenizer.json"), "tokenizer_2 has no voc"),
    "no shift": ("flux", edited("vae/config.json", shift_factor=None), "shift_factor = null"),
    "no T5 in the index": ("sd3", both(edited(INDEX, **T5), without(*T5)), ""),
    "no T5": ("sd3", without(*T5), "contains no text_encoder_3"),
    "CJK in the path": ("flux", moved, ""),
    "Karras sigmas": ("sd3", edited(S, use_karras_sigmas=True), "use_karras_sigmas = true"),
    "beta sigmas": ("flux", edited(S, use_beta_sigmas=True), "use_beta_sigmas = true"),
    "SD3 shifts dynamically": ("sd3", edited(S, use_dynamic_shifting=True), ""),
    "a terminal shift": ("flux", edited(S, shift_terminal=0.02), ""),
    "stochastic": ("flux", edited(S, stochastic_sampling=True), "stochastic_sampling = true"),
    "schnell": ("flux", edited(NET, guidance_embeds=False), ""),
    "another pipeline": ("flux", edited(INDEX, _class_name="FluxCustomPipeline"), "supported are"),
    "ControlNet": (
        "flux", edited(INDEX, _class_name="FluxControlNetPipeline"), "takes an image or a video",
    ),
    "IP adapter": (
        "flux", edited(INDEX, image_encoder=["transformers", "CLIPVisionModel"]), "image_encoder",
    ),
    "a byte order mark": ("flux", with_a_bom, "not a diffusers model"),
    "a comma too many": ("flux", with_a_comma, "no JSON"),
}  # fmt: skip
QUICK = {
    "as it is", "pointers of Git LFS", "a broken link", "an empty tokenizer", "no shift",
    "Karras sigmas", "a cache",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in CASES]
)
def test_a_folder_is_accepted_or_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    family, changed, said = CASES[name]
    folder = copy_of(family, tmp_path / "model")
    named = changed(folder) or folder
    (tmp_path / "p.txt").write_text("a cat\na dog\n")
    (tmp_path / "r.toml").write_text(f"""
        run = {{ name = "x", steps = 2 }}
        model = {{ folder = {json.dumps(str(named))}, device = "cpu", height = 32, width = 32 }}
        data.prompts = "p.txt"
        sampling = {{ steps = 4, sigmas = "model", window = 2 }}
        batch = {{ groups = 2, group_size = 2 }}
        trainer.learning_rate = 1e-4
        reward.scorers = [{{ name = "j", type = "jpeg-compressibility" }}]
    """)
    found = CliRunner().invoke(app, ["check", str(tmp_path / "r.toml")])
    if not said:
        assert found.exit_code == 0, found.exception
        return
    assert isinstance(found.exception, UserError), found.output
    assert re.search(said, str(found.exception)), str(found.exception)


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each, (*_, said) in CASES.items() if not said])
def test_a_folder_that_is_accepted_loads_and_encodes(name: str, tmp_path: Path) -> None:
    family, changed, _ = CASES[name]
    folder = copy_of(family, tmp_path / "model")
    named, whole = changed(folder) or folder, {"transformer", "text", "decoder"}
    model: Any = load_model(named, whole, device=torch.device("cpu"), dtype=torch.float32)  # type: ignore[arg-type]
    assert model.encode("a cat", guidance=3.5)["text"].isfinite().all()


def test_a_part_that_needs_a_package_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    folder = copy_of("flux", tmp_path / "model")
    change(folder / "text_encoder_2/config.json", quantization_config=NF4)
    with pytest.raises(UserError, match=r"cannot load .*bitsandbytes"):
        load_model(folder, {"text"}, device=torch.device("cpu"), dtype=torch.float32)
