"""How much of a text a source image takes, before any model is loaded."""

import json
from pathlib import Path

import pytest

from shared.errors import UserError
from shared.models.source_tokens import SETTINGS, check_source_tokens, source_tokens
from tests import tiny_models

SIZES = ((32, 48), (84, 84), (28, 616), (512, 512), (1000, 600), (1024, 1024), (2048, 512))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("qwen-image-edit", tmp_path_factory.mktemp("edit"))


@pytest.mark.parametrize("sizes", [{}, {"min_pixels": 3136, "max_pixels": 12845056}])
def test_tokens_are_those_that_the_processor_makes(folder: Path, sizes: dict[str, int]) -> None:
    from shared.diffusion.families.qwen_image import TextAndImage

    settings = folder / SETTINGS
    plain = json.loads(settings.read_text())
    settings.write_text(json.dumps(plain | sizes))
    processor = TextAndImage.load(folder, None)
    found = [source_tokens(folder, height, width) for height, width in SIZES]
    settings.write_text(json.dumps(plain))
    assert found == [processor.num_tokens(tiny_models.picture(*size)) for size in SIZES]


def test_an_image_that_leaves_no_room_for_a_prompt_is_refused(folder: Path, tmp_path: Path) -> None:
    check_source_tokens(folder, None, table="model", height=1024, width=1024)
    with pytest.raises(UserError, match=r"^model.text_tokens: .* 84 x 84, is 9 tokens .* to 265 "):
        check_source_tokens(folder, 9, table="model", height=84, width=84)
    check_source_tokens(folder, 10, table="model", height=84, width=84)
    (tmp_path / "model_index.json").write_bytes((folder / "model_index.json").read_bytes())
    with pytest.raises(UserError, match=f"has no {SETTINGS}, which defines how images are cut"):
        source_tokens(tmp_path, 84, 84)
