"""Plans for other devices than a run has, as `digenrl plan` makes them from its recipe.

Each plan is made by a process of that command, with limits of time and size, so neither readers of
the page nor the scheduler wait for it. Recent answers are cached.
"""

import re
import tempfile
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query

from digenrl.api.commands import Turns, run_command
from digenrl.api.models import PlanView
from digenrl.api.run_history import RunHistory
from shared.caches import SharedResults
from shared.process.http_api import errors

PLAN_S = 60.0
"""Longest time that a plan takes; then it is given up."""
MAX_DEVICES = 512
"""Devices that are planned for; `digenrl plan` takes more."""
MAX_KEPT_ANSWERS = 32
"""Answers that are kept."""
POOL = r"^[A-Za-z0-9_.=+*, -]{1,200}$"
Pool = Annotated[
    str | None,
    Query(pattern=POOL, description="hosts by kind and GPUs, e.g. h100x8*4 or h100x8*2+a100x8*2"),
]
Devices = Annotated[
    str | None, Query(pattern=POOL, description="GPUs by kind, e.g. h100=16,a100=16")
]
ProfileName = Annotated[
    str | None,
    Query(
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="cost profile; by default the profile of the model's network",
    ),
]
Staleness = Annotated[
    int | None, Query(ge=0, le=1, description="0 or 1, instead of what the recipe says")
]
HostGpus = Annotated[int, Query(ge=1, le=64, description="GPUs per host where only GPUs count")]


@dataclass(slots=True)
class WhatIf:
    """Plans for a run's recipe, one plan at a time."""

    history: RunHistory
    _plans: SharedResults[tuple[str, ...], PlanView] = field(
        default_factory=lambda: SharedResults(MAX_KEPT_ANSWERS)
    )
    _turns: Turns = field(default_factory=Turns)

    async def plan(self, **options: str | int | None) -> PlanView:
        """Return a plan; ``options`` have the names of the options of `digenrl plan`.

        Raises:
            HTTPException: if it cannot be made, or not in time.
        """
        await self.history.look()
        if self.history.recipe is None:
            raise HTTPException(404, f"the store holds no run {self.history.run!r}")
        pools = [str(options.get(each) or "") for each in ("hosts", "devices")]
        if not any(pools):
            raise HTTPException(422, "hosts: name the GPUs, e.g. h100x8*4")
        _check_size(*pools)
        given = {name: each for name, each in options.items() if each not in (None, "")}
        words = (f"--{name.replace('_', '-')}={each}" for name, each in given.items())
        question = (self.history.recipe.model_dump_json(), *words)
        return await self._plans.get(question, lambda: self._made(*question))

    async def _made(self, recipe: str, *options: str) -> PlanView:
        """Return the plan that `digenrl plan` makes for a recipe in JSON."""
        with tempfile.NamedTemporaryFile(prefix="digenrl-plan-", suffix=".json") as file:
            file.write(recipe.encode())
            file.flush()
            words = ("plan", file.name, *options, "--json")
            async with self._turns.turn():
                plan = await run_command(*words, limit_s=PLAN_S, refusal=422)
            return PlanView.model_validate_json(plan)


def _check_size(*pools: str) -> None:
    """Raises HTTPException if one of these names more devices than are planned for here."""
    for pool in pools:
        number = 0
        for part in re.split(r"[,+]", pool):
            counts = [int(each) for each in re.findall(r"(?:=|x|\*)(\d{1,9})", part)]
            product = 1
            for each in counts:
                product *= each
            number += product if counts else 0
        if number > MAX_DEVICES:
            raise HTTPException(
                422, f"hosts: at most {MAX_DEVICES} devices are planned here, not {number}; use "
                "`digenrl plan`",
            )  # fmt: skip


def plan_routes(what_if: WhatIf) -> APIRouter:
    router = APIRouter(tags=["plan"])

    @router.get("/v1/plan", operation_id="get_plan", responses=errors(404, 503))
    async def plan(
        hosts: Pool = None,
        devices: Devices = None,
        profile: ProfileName = None,
        staleness: Staleness = None,
        host_gpus: HostGpus = 8,
    ) -> PlanView:
        """Plan the run's recipe on other devices: the splits that `digenrl plan` finds.

        Takes seconds, and changes nothing.
        """
        return await what_if.plan(
            hosts=hosts, devices=devices, profile=profile, staleness=staleness, host_gpus=host_gpus
        )

    return router
