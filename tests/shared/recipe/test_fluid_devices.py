"""The number of fluid devices has a limit, and shard groups that cannot be are refused."""

from typing import Any

import pytest

from digenrl.planning.entries import Processes
from shared.errors import UserError
from shared.limits import MAX_MEMBERS
from shared.recipe.recipe import load_recipe, override
from tests.paths import ROOT

SHARDED = {"trainer.shard_devices": 4, "trainer.devices": 4, "rollout.workers": 1}
FLUID = load_recipe(ROOT / "recipes" / "digits-fluid.toml")


def test_there_may_be_as_many_as_one_message_names() -> None:
    with pytest.raises(UserError) as refused:
        override(FLUID, {"trainer.devices": MAX_MEMBERS + 1})
    said = str(refused.value)
    assert said.startswith("trainer.devices: ") and "set it to" in said and "\n" not in said
    assert override(FLUID, {"trainer.devices": MAX_MEMBERS}).trainer.devices == MAX_MEMBERS


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({**SHARDED, "trainer.shard_devices": 3}, "trainer.shard_devices"),
        ({**SHARDED, "trainer.shard_devices": 8}, "trainer.shard_devices"),
    ],
)
def test_groups_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f"^{key}: ") as refused:
        override(FLUID, changes)
    assert "\n" not in str(refused.value)


def test_devices_that_share_weights_are_as_many_members_as_groups() -> None:
    recipe = override(FLUID, {**SHARDED, "trainer.shard_devices": 2})
    assert Processes.of_run(recipe).names("trainer") == ["trainer-0", "trainer-1"]
    assert Processes.of_run(override(FLUID, SHARDED)).names("trainer") == ["trainer-0"]
