"""Plans for other devices than a run has, each by a process of its own."""

import asyncio
from pathlib import Path

import pytest
from fastapi import HTTPException

from digenrl.api import what_if
from digenrl.api.run_history import RunHistory
from digenrl.api.what_if import WhatIf
from shared.recipe.recipe import load_recipe, override
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.follow.runs import RUN, Run
from tests.paths import ROOT
from tests.stored_recipe import store_recipe

SD35 = ROOT / "recipes" / "sd35-large.toml"


@pytest.fixture
def planner(tmp_path: Path) -> WhatIf:
    store = ObjectStore(FolderBackend(tmp_path / "objects"))
    asyncio.run(store_recipe(store, override(load_recipe(SD35), {"run.name": RUN})))
    return WhatIf(RunHistory(store, RUN))


async def test_a_run_is_planned_as_the_command_plans_it_and_once(planner: WhatIf) -> None:
    found = await planner.plan(hosts="h100x2*1", staleness=0)
    assert (found.profile, found.devices) == ("sd35-large", {"H100": 2})
    seconds = [each.step_seconds for each in found.choices]
    assert seconds == sorted(seconds) and seconds[0] >= (found.bound_seconds or 0) > 0
    assert await planner.plan(hosts="h100x2*1", staleness=0) is found


async def test_what_cannot_be_planned_is_refused_in_a_line(
    planner: WhatIf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for asked, status, reason in (
        ({"hosts": "h100x8*100"}, 422, "hosts: at most 512 devices are planned here, not 800"),
        ({"devices": "h100=9999"}, 422, "at most 512 devices"),
        ({}, 422, "hosts: name the GPUs"),
    ):
        with pytest.raises(HTTPException) as found:
            await planner.plan(**asked)
        assert found.value.status_code == status and reason in found.value.detail
    monkeypatch.setattr(what_if, "PLAN_S", 0.01)
    with pytest.raises(HTTPException) as late:
        await planner.plan(hosts="h100x8*2")
    assert late.value.status_code == 503 and "no plan within 0.01 s" in late.value.detail


@pytest.fixture
def unknown(tmp_path: Path) -> WhatIf:
    """The planner of a run without a cost profile."""
    return WhatIf(RunHistory(Run(tmp_path / "unknown").begin().store, RUN))


async def test_what_no_cost_profile_has_is_refused(planner: WhatIf, unknown: WhatIf) -> None:
    for asked, given, reason in (
        (unknown, {"hosts": "h100x8*2"}, "profile: no cost profile fits the network"),
        (planner, {"profile": "sd35-large", "hosts": "z80x8*2"}, "hosts: sd35-large knows no z80"),
    ):
        with pytest.raises(HTTPException) as found:
            await asked.plan(**given)
        assert found.value.status_code == 422 and found.value.detail.startswith(reason)
