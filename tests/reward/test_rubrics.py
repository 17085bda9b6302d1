"""Questions to a judge that a recipe names, and answers in their authors' form."""

import hashlib
import re
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from services.reward.scorers.judge import data_url, request, score_in
from shared.recipe.rewards import Judge
from shared.recipe.rubrics import PUBLISHED, RUBRICS


def test_unified_reward_is_asked_as_its_authors_ask() -> None:
    """Images first, in the order in which their code takes frames, and a digest of their words."""
    table = Judge(model="m", rubric="unified-reward-video", frames=4)
    video = np.stack([np.full((3, 4, 4), 10 * number, np.uint8) for number in range(9)])
    asked: Any = request(table, video, "a dog runs")
    *frames, text = asked["messages"][0]["content"]
    chosen = [int(number * 9 / 4) for number in range(4)]
    assert [each["image_url"]["url"] for each in frames] == [data_url(video[n]) for n in chosen]
    assert text["text"].endswith("as follows:\nText Caption: [a dog runs]")
    digests = {hashlib.sha256(RUBRICS[name].encode()).hexdigest()[:16] for name in PUBLISHED}
    assert digests == {"75d52d3ae771f89b", "707411fb9175547e"}


RATED = r"(\w+) Score \(1-5\):\s*([0-5](?:\.\d+)?)"
"""How CodeGoat24/Pref-GRPO reads an answer."""
IMAGE = "unified-reward-image"


@pytest.mark.parametrize(
    "answer",
    [
        "Alignment Score (1-5): 2.694700002670288\nCoherence Score (1-5): 2.371500015258789\n"
        "Style Score (1-5): 2.802500009536743",
        "\nStyle Score (1-5):4\n\nAlignment Score (1-5): 5\nCoherence Score (1-5): 1.0\n",
        "Alignment Score (1-5): 3, Coherence Score (1-5): 2.5, Style Score (1-5): 4.25.",
    ],
)
def test_an_answer_of_unified_reward_is_read_as_its_authors_read_it(answer: str) -> None:
    published = {axis: float(number) for axis, number in re.findall(RATED, answer)}
    for axis, number in published.items():
        table = Judge(model="m", rubric=f"{IMAGE}-{axis.lower()}")
        assert score_in(answer, table) == number / 5
    mean = sum(published.values()) / 15
    assert score_in(answer, Judge(model="m", rubric=IMAGE)) == pytest.approx(mean)


@pytest.mark.parametrize(
    "answer",
    [
        "Alignment Score (1-5): 3\nStyle Score (1-5): 4", "I cannot rate this.", "4", "",
        "Alignment Score (1-5): 3\nCoherence Score (1-5): 10\nStyle Score (1-5): 4",
        "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z",
    ],
)  # fmt: skip
def test_an_answer_without_a_rating_on_each_axis_fails(answer: str) -> None:
    with pytest.raises(ValueError, match="does not rate Alignment, Coherence, Style from 0 to 5"):
        score_in(answer, Judge(model="m", rubric=IMAGE))


def test_a_rubric_is_a_question_and_stays_one_in_a_stored_recipe() -> None:
    for name in RUBRICS:
        table = Judge.model_validate({"model": "m", "rubric": name})
        assert table.prompt == RUBRICS[name] and "{prompt}" in table.prompt
        assert (table.highest == 5) == (name in PUBLISHED) == ("{highest}" not in table.prompt)
        assert Judge.model_validate(table.model_dump(mode="json")) == table
    with pytest.raises(ValidationError, match="rubric: excludes prompt"):
        Judge(model="m", rubric="fit", prompt="what?")
    with pytest.raises(ValidationError, match="rubric: 'fitt' is unknown; use one of: edit, fit, "):
        Judge(model="m", rubric="fitt")
