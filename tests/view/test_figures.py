"""What the pages show of devices."""

from typing import cast

import pytest

from digenrl.view.figures import schedule_of
from digenrl.view.history import RunHistory
from services.scheduler.core.usage import BatchUsage
from shared.recipe.recipe import load_recipe
from shared.store import ObjectStore
from tests.paths import ROOT


@pytest.mark.parametrize("recipe", ["digits", "digits-fluid"])
def test_fluid_devices_exchange_gradients_and_others_commit(recipe: str) -> None:
    history = RunHistory(cast(ObjectStore, None), "test")
    history.recipe = load_recipe(ROOT / "recipes" / f"{recipe}.toml")
    for batch, seconds in ((0, 1.0), (1, 2.0)):
        devices = {"trainer-0": {"training": 3.0, "committing": seconds}}
        usage = {"batch": batch, "seconds": 5.0, "devices": devices}
        history.usage[batch] = BatchUsage.model_validate(usage)
    shown = schedule_of(history)
    is_fluid = recipe == "digits-fluid"
    assert shown["exchanged"] == ({"trainer-0": 1.5} if is_fluid else {})
    assert shown["uses"]["committing"] == ("exchanges gradients" if is_fluid else "commits")
