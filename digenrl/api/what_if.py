"""Plans for other devices than a run has, as `digenrl plan` makes them from its recipe.

Each plan is made by a process of its own, with limits of time and size, so neither readers of the
page nor the scheduler wait for it. Recent answers are cached.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel

from digenrl.api.commands import Turns, run_command
from digenrl.api.models import PlanView
from digenrl.api.run_history import RunHistory
from digenrl.planning.child import MAX_DEVICES, PlanRequest
from shared.caches import keep_newest
from shared.process.http_api import errors

PLAN_S = 60.0
"""Longest time that a plan takes; then it is given up."""
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


class Answer(BaseModel):
    """Output of the process that makes a plan (`digenrl.planning.child`)."""

    plan: PlanView | None = None
    refused: str = ""


@dataclass(slots=True)
class WhatIf:
    """Plans for a run's recipe, one plan at a time."""

    history: RunHistory
    _kept: dict[PlanRequest, PlanView] = field(default_factory=dict)
    _turns: Turns = field(default_factory=Turns)

    async def plan(self, **arguments: Any) -> PlanView:
        """Return a plan.

        Raises:
            HTTPException: if it cannot be made, or not in time.
        """
        await self.history.look()
        if self.history.recipe is None:
            raise HTTPException(404, f"the store holds no run {self.history.run!r}")
        if not arguments.get("hosts") and not arguments.get("devices"):
            raise HTTPException(422, "hosts: name the GPUs, e.g. h100x8*4")
        _check_size(arguments.get("hosts"), arguments.get("devices"))
        question = PlanRequest(recipe=self.history.recipe.model_dump_json(), **arguments)
        if question not in self._kept:
            async with self._turns.turn():
                plan = self._kept.get(question) or await _made(question)
            keep_newest(self._kept, question, plan, MAX_KEPT_ANSWERS)
        return self._kept[question]


async def _made(question: PlanRequest) -> PlanView:
    """Return the plan that a process of its own makes."""
    output = await run_command(
        "plan", module="digenrl.planning.child", data=question.model_dump_json().encode(),
        limit_s=PLAN_S,
    )  # fmt: skip
    answer = Answer.model_validate_json(output)
    if answer.plan is None:
        raise HTTPException(422, answer.refused)
    return answer.plan


def _check_size(*pools: str | None) -> None:
    """Raises HTTPException if one of these names more devices than are planned for here."""
    for pool in pools:
        number = 0
        for part in re.split(r"[,+]", pool or ""):
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
        given: Literal[0, 1] | None = None if staleness is None else 1 if staleness else 0
        return await what_if.plan(
            hosts=hosts, devices=devices, profile=profile, staleness=given, host_gpus=host_gpus
        )

    return router
