"""Every pipeline of diffusers is a family here, or refused with a reason."""

import json
from pathlib import Path

import diffusers
import pytest

from shared.errors import UserError
from shared.models.catalogue import find_family
from shared.models.families import FAMILIES
from shared.models.refused import REFUSED

BASES = {"DiffusionPipeline", "ModularPipeline"}


def test_every_pipeline_of_diffusers_is_supported_or_refused_with_a_reason() -> None:
    there = {name for name in dir(diffusers) if name.endswith("Pipeline")} - BASES
    assert len(there) > 300
    assert sorted(there - FAMILIES.keys() - REFUSED.keys()) == []
    assert not FAMILIES.keys() & REFUSED.keys()


@pytest.mark.parametrize(
    ("pipeline", "reason"),
    [
        ("QwenImageEditPlusPipeline", "takes an image or a video besides the text"),
        ("LTX2ImageToVideoPipeline", "takes an image or a video besides the text"),
        ("LTXPipeline", "has no adapter here"),
        ("StableDiffusionXLPipeline", "predicts noise"),
        ("StableCascadeCombinedPipeline", "is made of several diffusion models"),
    ],
)
def test_the_reason_is_told_in_one_line(pipeline: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    with pytest.raises(UserError, match=rf"holds a {pipeline}, which {reason}.*; supported are:"):
        find_family(tmp_path)
