"""What a user takes away: an adapter that plain diffusers loads, and the same samples from both."""

from pathlib import Path

import av
import diffusers
import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from digenrl.evaluation.sampler import Sampler, noise_seed
from digenrl.report.export import export_adapter, export_network
from digenrl.report.generate import generate
from digenrl.report.pipeline_code import _loading
from shared.diffusion.sampling.decoding import to_uint8
from shared.diffusion.weights.trained_weights import trained_tensors
from shared.errors import UserError
from shared.models.catalogue import find_family
from shared.recipe.recipe import Recipe, override
from tests import tiny_models
from tests.report.tiny_recipes import HEIGHT, STEPS, WIDTH, recipe_of
from tests.tiny_models import PROMPT

NUM, SEED = 2, 5


def trained(recipe: Recipe) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:
    """An adapter that changes what is made, and the shape of a sample's latents."""
    model, size = Sampler(recipe).model, recipe.model
    generator, is_full = torch.Generator().manual_seed(9), recipe.model.trained == "full"
    tensors = {
        name: tensor * is_full + 0.3 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in trained_tensors(model.transformer).items()
    }
    return tensors, model.latent_shape(height=size.height, width=size.width, frames=size.frames)


def read(paths: list[Path]) -> npt.NDArray[np.uint8]:
    """The stills of one sample, (F, H, W, 3)."""
    return np.stack([np.asarray(Image.open(path)) for path in paths if path.suffix == ".png"])


EXPERTS = {"lora": "both", "lora, high": "high", "lora, low": "low"}
QUICK = [("sd3", "lora"), ("wan", "lora"), ("wan22", "lora"), ("sd3", "full"), ("wan22", "full")]
"""An image, a video and two networks; adapters of all families are drawn by the card's code
(test_card.py)."""
SLOW = [
    *((family, "lora") for family in tiny_models.FAMILIES if family not in ("sd3", "wan")),
    ("wan22", "lora, high"), ("wan22", "lora, low"), ("wan", "full"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "what"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_diffusers_makes_the_same_of_what_is_exported(
    family: str, what: str, tmp_path: Path
) -> None:
    recipe = override(recipe_of(family, tmp_path), {
        "model.trained": what.split(",")[0],
        "model.guidance_2": 3.0 if family == "wan22" else None,
        "model.lora": {"rank": 4, "alpha": 16.0, "experts": EXPERTS.get(what, "both")},
    })  # fmt: skip
    tensors, shape = trained(recipe)
    export = export_network if what == "full" else export_adapter
    export(tmp_path / "adapter", tensors, recipe)

    def ours(adapter: Path | None, out: str) -> npt.NDArray[np.uint8]:
        made = generate(recipe, adapter, [PROMPT], num_each=NUM, seed=SEED, out=tmp_path / out)
        paths = list(made)
        assert all(path.is_file() for path in paths)
        return np.stack([
            read([path for path in paths if f"000-{number}" in str(path)]) for number in range(NUM)
        ])  # fmt: skip

    with_adapter, base = ours(tmp_path / "adapter", "with"), ours(None, "base")
    assert (with_adapter != base).mean() > 0.2

    pipeline = diffusers.DiffusionPipeline.from_pretrained(recipe.model.folder)
    pipeline.set_progress_bar_config(disable=True)
    if what == "full":
        for folder in (tmp_path / "adapter").iterdir():
            network = type(pipeline.transformer).from_pretrained(folder)
            pipeline.register_modules(**{folder.name: network})
    elif family == "wan22":
        for line in _loading(recipe):
            exec(
                line.replace('"."', "folder"),
                {"pipeline": pipeline, "folder": tmp_path / "adapter"},
            )
    else:
        pipeline.load_lora_weights(tmp_path / "adapter")
    start = torch.stack([
        torch.randn(shape, generator=torch.Generator().manual_seed(noise_seed(SEED, 0, index)))
        for index in range(NUM)
    ])  # fmt: skip
    pixels = tiny_models.run(
        family, pipeline, start, guidance=recipe.model.guidance, output="pt",
        height=HEIGHT, width=WIDTH, frames=recipe.model.frames, steps=STEPS,
        guidance_2=recipe.model.guidance_2,
        negative=find_family(recipe.model.folder).negative_prompt or None,
    )  # fmt: skip
    theirs = to_uint8(pixels).numpy()
    theirs = theirs[:, None] if theirs.ndim == 4 else theirs
    assert with_adapter.shape == theirs.transpose(0, 1, 3, 4, 2).shape
    difference = np.abs(with_adapter.astype(int) - theirs.transpose(0, 1, 3, 4, 2))
    assert difference.max() <= 1, "rounding"


def test_a_video_is_an_mp4_and_its_frames(tmp_path: Path) -> None:
    from digenrl.evaluation.media import save

    video = np.zeros((5, 3, 33, 48), np.uint8)
    video[:, 0] = np.arange(5, dtype=np.uint8)[:, None, None] * 50
    first, *stills = save(tmp_path, "red", video)
    assert first.name == "red.mp4" and len(stills) == 5
    assert (read(stills).transpose(0, 3, 1, 2) == video).all()
    with av.open(str(first)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.stack(frames).shape == (5, 32, 48, 3), "an even number of rows"
    means = [frame[..., 0].mean() for frame in frames]
    assert means == pytest.approx([0, 50, 100, 150, 200], abs=12)


def test_a_gray_image_is_a_gray_png(tmp_path: Path) -> None:
    from digenrl.evaluation.media import save

    image = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    [path] = save(tmp_path / "new", "x", image)
    assert (np.asarray(Image.open(path)) == image[0]).all()


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of("sd3", tmp_path)
    tensors, _ = trained(recipe)
    export_adapter(tmp_path / "other", dict(list(tensors.items())[:4]), recipe)
    refused = ((tmp_path / "other", "does not fit"), (tmp_path / "no", "does not exist"))
    for adapter, said in refused:
        made = generate(recipe, adapter, [PROMPT], num_each=1, seed=0, out=tmp_path / "out")
        with pytest.raises(UserError, match=said):
            next(made)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    recipe = recipe_of("sd3", tmp_path)
    (tmp_path / "taken").write_text("a file")
    made = generate(recipe, None, [PROMPT], num_each=1, seed=0, out=tmp_path / "taken")
    with pytest.raises(UserError, match=r"--out: cannot write to .*taken"):
        list(made)
