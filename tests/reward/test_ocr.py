"""The text reward reads real pictures of words."""

from statistics import mean

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageDraw, ImageFont

from services.reward.prompt_checks import wanted_text
from services.reward.scorer import build_scorers
from services.reward.scorers.ocr import text_score
from shared.recipe.rewards import ScorerTable

WORDS = [
    "apple", "river", "stone", "candle", "window", "garden", "market", "silver", "winter",
    "summer", "bridge", "castle", "desert", "engine", "forest", "guitar", "harbor", "island",
    "jacket", "kitten", "ladder", "mirror", "number", "orange", "pencil", "quartz", "rabbit",
    "saddle", "tunnel", "velvet", "walnut", "yellow", "zipper", "basket", "carpet", "dragon",
    "eleven", "finger", "goblet", "hammer", "insect", "jungle", "kettle", "lemons", "magnet",
    "needle", "oyster", "parrot", "ribbon", "signal",
]  # fmt: skip


def picture(word: str) -> npt.NDArray[np.uint8]:
    image = Image.new("RGB", (256, 96), (250, 245, 230))
    draw = ImageDraw.Draw(image)
    draw.text((24, 20), word, fill=(20, 30, 120), font=ImageFont.load_default(size=44))
    return np.asarray(image).transpose(2, 0, 1)


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("number", [4, len(WORDS)])
def test_the_right_word_scores_high_and_a_wrong_one_low(number: int) -> None:
    words = WORDS[:number]
    [scorer] = build_scorers([ScorerTable(name="text", type="ocr")])
    images = np.stack([picture(word) for word in words])
    right = [{"prompt": f'a sign that says "{word}"'} for word in words]
    wrong = [*right[number // 2 :], *right[: number // 2]]
    assert mean(scorer.score(images, right)) > 0.9
    assert mean(scorer.score(images, wrong)) < 0.5
    blank = np.full_like(images[:1], 255)
    assert scorer.score(blank, right[:1]) == [0.0]
    assert scorer.score(images[:1].mean(1, keepdims=True).astype(np.uint8), right[:1]) == [1.0]


@pytest.mark.parametrize(
    ("wanted", "read", "score"),
    [
        ("newyork", "I love New York", 1.0),
        ("newyork", "new yo", 1 - 2 / 7),
        ("no", "a very large picture at last", 0.0),
        ("hi", "", 0.0),
    ],
)
def test_a_text_scores_by_its_distance(wanted: str, read: str, score: float) -> None:
    assert text_score(wanted, read) == pytest.approx(score)


def test_the_wanted_text_is_the_first_in_quotes_or_the_metadata_s() -> None:
    assert wanted_text({"prompt": 'says "New  York" and "more"'}) == "newyork"
    assert wanted_text({"prompt": 'says "this"', "text": "That"}) == "that"
    for empty in ({"prompt": "no quotes"}, {"prompt": '""'}, {}):
        with pytest.raises(ValueError, match="double quotes"):
            wanted_text(empty)
