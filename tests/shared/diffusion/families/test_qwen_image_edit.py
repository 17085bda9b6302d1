"""What Qwen-Image-Edit's text encoder is given, and how long it may be."""

from pathlib import Path

import pytest
import torch

from shared.diffusion.loading.models import load_model
from shared.errors import UserError
from tests import tiny_models

CPU = torch.device("cpu")


def test_a_text_with_no_room_beside_the_image_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.save("qwen-image-edit", tmp_path)
    model = load_model(
        folder, {"text", "decoder"}, device=CPU, dtype=torch.float32, max_text_tokens=9
    )
    image = tiny_models.source("qwen-image-edit", 84, 84)
    with pytest.raises(UserError, match=r"image alone has 9 tokens, and 9 .* key to 265 or more"):
        model.encode("thicker", guidance=1.0, image=image)
    (folder / "processor" / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match=r"has no processor/preprocessor_config[.]json; choose"):
        load_model(folder, {"text"}, device=CPU, dtype=torch.float32)
