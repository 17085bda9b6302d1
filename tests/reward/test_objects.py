"""Objects, counts, colours and positions that an image has to show, and what a detector finds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bench.digits.text import clip_tokenizer
from services.reward.object_checks import (
    COLOURS,
    DetectedObject,
    directions,
    parse_requirements,
    share_met,
)
from services.reward.scorer import check_prompts
from services.reward.scorers import objects
from services.reward.scorers.inputs import rgb
from services.reward.scorers.objects import Objects, OwlDetector
from shared.errors import UserError
from shared.messages.contracts import Prompt
from shared.recipe.rewards import ScorerTable
from tests.reward.tiny_scorers import images, shaken


def found(
    name: str, left: float = 0.0, colour: str | None = None, top: float = 0.0
) -> DetectedObject:
    return DetectedObject(name, 0.9 - left / 1000, (left, top, left + 10, top + 10), colour)


CATS = [found("cat", 0.0, "red"), found("cat", 20.0, "blue")]
TWO = {"class": "cat", "count": 2}
RED = {"class": "cat", "color": "red"}
BESIDE = [{"class": "cat"}, {"class": "dog", "position": ["right of", 0]}]


@pytest.mark.parametrize(
    ("include", "exclude", "shown", "share"),
    [
        ([TWO], [], CATS, 1.0),
        ([TWO], [], CATS[:1], 0.0),
        ([TWO], [{"class": "cat", "count": 3}], [*CATS, found("cat", 40.0)], 0.5),
        ([RED], [], CATS, 1.0),
        ([RED], [], CATS[1:], 0.5),  # a cat, and not red
        ([{"class": "cat", "count": 2, "color": "red"}], [], CATS, 0.5),
        (BESIDE, [], [CATS[0], found("dog", 50.0)], 1.0),
        (BESIDE, [], [CATS[0], found("dog", 0.0, top=50.0)], 2 / 3),
        (BESIDE, [], [found("dog", 50.0)], 1 / 3),  # right of nothing
        (BESIDE, [], [], 0.0),
    ],
)
def test_the_score_is_the_share_of_the_conditions_that_hold(
    include: list[Any], exclude: list[Any], shown: list[DetectedObject], share: float
) -> None:
    given = {"include": json.dumps(include), "exclude": json.dumps(exclude)}
    assert share_met(parse_requirements(given), shown) == pytest.approx(share)


@pytest.mark.parametrize(
    ("left", "top", "named"),
    [
        (40, 0, {"right of"}), (-40, 0, {"left of"}), (0, 40, {"below"}), (0, -40, {"above"}),
        (40, 40, {"right of", "below"}), (1, 1, set()),
    ],
)  # fmt: skip
def test_directions_are_those_between_the_middles(left: int, top: int, named: set[str]) -> None:
    assert directions((left, top, left + 10, top + 10), (0, 0, 10, 10)) == named


@pytest.mark.parametrize(
    ("metadata", "fault"),
    [
        ({}, "metadata.include: missing; list the objects to show"),
        ({"include": "cat"}, "metadata.include: is no JSON list, as a text"),
        ({"include": "[]"}, "metadata.include: is empty; name an object"),
        ({"include": '[{"class": "cat", "number": 2}]'}, "entry 0.number: Extra inputs"),
        ({"include": '[{"class": "cat", "color": "teal"}]'}, "entry 0.color: Input should be 'red"),
        (
            {"include": '[{"class": "cat", "position": ["above", 0]}]'},
            "entry 0: position is seen from entry 0, which has to be an earlier one",
        ),
    ],
)
def test_prompts_that_name_no_objects_are_refused_before_the_run(
    metadata: dict[str, Any], fault: str
) -> None:
    table = ScorerTable(name="seen", type="objects")
    with pytest.raises(UserError) as refused:
        check_prompts(table, [Prompt(text="two cats", metadata=metadata)])
    said = str(refused.value)
    assert said.startswith("reward.scorers.seen: the prompt 'two cats': ") and fault in said
    check_prompts(table, [Prompt(text="cats", metadata={"include": json.dumps([TWO])})])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Owlv2Config, Owlv2ForObjectDetection, Owlv2ImageProcessorPil

    path = tmp_path_factory.mktemp("owl")
    tokenizer = clip_tokenizer(16)
    sizes = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    config = Owlv2Config(
        text_config={
            **sizes, "vocab_size": len(tokenizer), "max_position_embeddings": 16,
            "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={**sizes, "image_size": 64, "patch_size": 16},
        projection_dim=16,
    )  # fmt: skip
    shaken(Owlv2ForObjectDetection(config), 0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    Owlv2ImageProcessorPil(size={"height": 64, "width": 64}).save_pretrained(path)
    return path


def test_boxes_and_scores_are_those_that_transformers_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "THRESHOLD", 0.0)
    monkeypatch.setattr(objects, "SAME_BOX", 2.0)
    owl, picture = OwlDetector(folder), rgb(images(1, 24, 40)[0])
    wanted = parse_requirements(
        {"include": '[{"class": "five"}, {"class": "two", "color": "red"}]'}
    )
    [ours] = owl.find([picture], wanted)
    texts = ["a photo of a five", "a photo of a two"]
    tokens = owl._tokens([*texts, *(f"a photo of a {each} two" for each in COLOURS)])
    pixels = owl._processor(images=[picture], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        output = owl._model(pixel_values=pixels, **tokens)
    output.logits = output.logits[..., : len(texts)]
    [theirs] = owl._processor.post_process_object_detection(
        output, threshold=0.0, target_sizes=[(40, 40)]
    )
    for score, label, box in zip(theirs["scores"], theirs["labels"], theirs["boxes"], strict=True):
        name = ("five", "two")[int(label)]
        alike = [each for each in ours if each.name == name and each.box == tuple(box.tolist())]
        assert alike and alike[0].score == pytest.approx(float(score), abs=1e-6)
    assert {each.colour for each in ours if each.name == "five"} == {None}
    assert {each.colour for each in ours if each.name == "two"} <= set(COLOURS)


def test_samples_are_scored_by_what_is_found_in_each(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bright:
        """Finds a cat in what is bright, and one more for each picture before it in the call."""

        def find(self, pictures: list[Image.Image], wanted: Any) -> list[list[DetectedObject]]:
            return [CATS if np.asarray(each).mean() > 100 else CATS[:1] for each in pictures]

    scorer = Objects(folder)
    monkeypatch.setattr(scorer, "_detector", Bright())
    batch = np.zeros((3, 3, 8, 8), dtype=np.uint8)
    batch[1] = 255
    one, two = ({"include": json.dumps([each])} for each in ({"class": "cat"}, TWO))
    assert scorer.score(batch, [two, two, one]) == [0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"metadata\.include: missing"):
        scorer.score(batch[:1], [{"prompt": "a cat"}])
