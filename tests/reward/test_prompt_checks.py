"""Prompts that a scorer could not score are refused before a run begins."""

from pathlib import Path

import pytest
from pydantic import JsonValue

from digenrl.local.checking.inputs import check_except_model
from services.reward.prompt_checks import wanted_digit
from services.reward.scorer import check_digits, check_prompts
from shared.errors import UserError
from shared.messages.contracts import Prompt
from shared.recipe.recipe import load_recipe
from shared.recipe.rewards import ScorerTable
from tests.paths import DIGITS

EDIT: dict[str, JsonValue] = {"edit": "slant", "digit": 3}


@pytest.mark.parametrize(
    ("type", "good", "bad", "said"),
    [
        ("ocr", Prompt(text='a sign, "HI"'), Prompt(text="a fox"), 'no text in "double quotes"'),
        ("ocr", Prompt(text="a", metadata={"text": "b"}), Prompt(text='a ""'), "no text in"),
        ("digit-probability", Prompt(text="a", metadata={"digit": 3}), Prompt(text="a"), "None"),
        ("digit-edit", Prompt(text="a", metadata=EDIT), Prompt(text="a"), "need an edit, one of"),
    ],
)
def test_a_prompt_that_cannot_be_scored_names_scorer_prompt_and_remedy(
    type: str, good: Prompt, bad: Prompt, said: str
) -> None:
    table = ScorerTable.model_validate({"name": "mine", "type": type})
    check_prompts(table, [good, good])
    with pytest.raises(UserError, match=rf"^reward\.scorers\.mine: the prompt .*{said}.*; correct"):
        check_prompts(table, [good, bad])


def test_a_digit_may_be_a_text_as_a_csv_file_has_it() -> None:
    assert wanted_digit({"digit": "3"}) == 3
    for none in ("33", "", "x", True, 10, None):
        with pytest.raises(ValueError, match="needs metadata like"):
            wanted_digit({"digit": none})


def test_held_out_judges_ask_as_well_and_a_run_that_goes_on_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "fox.txt").write_text("a fox")
    (tmp_path / "three.csv").write_text("prompt,digit\na three,3\n")
    mine = {"data.prompts": str(tmp_path / "three.csv")}
    check_except_model(load_recipe(DIGITS, mine))
    held_out = load_recipe(DIGITS, mine | {"evaluation.prompts": str(tmp_path / "fox.txt")})
    with pytest.raises(UserError, match=r"^reward\.scorers\.proxy: the prompt 'a fox'"):
        check_except_model(held_out)
    check_except_model(held_out, begun=True)
    with pytest.raises(
        UserError, match=r"^evaluation\.digits: the prompt 'a fox': .*\.digits none$"
    ):
        check_digits([Prompt(text="a fox")])
