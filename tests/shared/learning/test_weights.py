"""Prompts are taken as often as their weights say (`data.weights`)."""

from collections import Counter

import pytest

from shared.errors import UserError
from shared.learning.prompts import PromptOrder, repeated
from shared.messages.contracts import Prompt


def prompts(*weights: float | str) -> list[Prompt]:
    return [
        Prompt(text=f"p{number}", metadata={"weight": weight})
        for number, weight in enumerate(weights)
    ]


def test_an_epoch_takes_each_prompt_as_often_as_its_weight_says() -> None:
    order = PromptOrder(repeated(prompts(0.5, "1", 2.0, 0), "weight"), seed=3)
    for first in (0, 7):
        taken = [order.of_group(first + group, 0, 1).text for group in range(7)]
        assert Counter(taken) == {"p0": 1, "p1": 2, "p2": 4}


def test_the_position_is_the_number_of_the_batch() -> None:
    weighted = repeated(prompts(1, 3, 2), "weight")
    whole, resumed = PromptOrder(weighted, seed=1), PromptOrder(weighted, seed=1)
    later = [whole.of_group(batch, group, 4).text for batch in range(9) for group in range(4)][20:]
    assert [
        resumed.of_group(batch, group, 4).text for batch in range(5, 9) for group in range(4)
    ] == later


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ((1, "many"), "the prompt 'p1' has no number from 0 as weight, but 'many'"),
        ((1, -1), "no number from 0 as weight, but -1"),
        ((0, 0), "no prompt has a weight above 0"),
        ((1, 5000), "weight is from 1 to 5000; the largest may be 1000 times"),
    ],
)
def test_weights_that_are_none_are_refused(weights: tuple[float | str, ...], said: str) -> None:
    with pytest.raises(UserError, match=f"^data.weights: .*{said}"):
        repeated(prompts(*weights), "weight")


def test_a_prompt_without_a_weight_is_named() -> None:
    with pytest.raises(UserError, match="'bare' has no number from 0 as weight, but None"):
        repeated([Prompt(text="bare")], "weight")
