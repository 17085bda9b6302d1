"""What fluid devices do not do is refused with field and remedy; their number has a limit."""

from typing import Any

import pytest

from shared.errors import UserError
from shared.messages.fluid import MAX_MEMBERS
from shared.recipe.recipe import load_recipe, override
from tests.paths import ROOT

FLUID = load_recipe(ROOT / "recipes" / "digits-fluid.toml")


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.devices": MAX_MEMBERS + 1},
        {"trainer.hosts": 2},
        {"trainer.sharded": True},
        {"schedule.max_staleness": "auto"},
    ],
    ids=lambda changes: list(changes)[-1],
)
def test_what_they_do_not_do_is_refused_in_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        override(FLUID, changes)
    said = str(refused.value)
    assert list(changes)[-1] in said and "set it to" in said and "\n" not in said
    assert 'or schedule.mode to "pipelined"' in said


def test_there_may_be_as_many_as_one_message_names() -> None:
    assert override(FLUID, {"trainer.devices": MAX_MEMBERS}).trainer.devices == MAX_MEMBERS
