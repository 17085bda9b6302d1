"""Makes one plan in a process of its own, for the run's page: a question on stdin, JSON on stdout.

    python -m digenrl.planning.child < question.json

A question that cannot be planned is answered as well, with the reason. The process lets everything
else on its host go first, and ends at its limit of CPU time.
"""

import json
import os
import resource
import sys
from typing import Literal

from pydantic import BaseModel, ConfigDict

from shared.errors import UserError

CPU_S = 60
MAX_DEVICES = 512
"""Devices that are planned for; `digenrl plan` takes more."""


class PlanRequest(BaseModel):
    """Request for a plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: str
    """The resolved recipe as JSON."""
    hosts: str | None = None
    devices: str | None = None
    profile: str | None = None
    staleness: Literal[0, 1] | None = None
    host_gpus: int = 8


def answer(question: PlanRequest) -> dict[str, object]:
    """Return the plan, or the reason why there is no plan."""
    from digenrl.planning.output import plan_fields  # what the page does not import
    from digenrl.planning.plan import plan
    from shared.recipe.recipe import stored_recipe

    try:
        result = plan(
            stored_recipe(question.recipe.encode()), question.devices, profile=question.profile,
            staleness=question.staleness, host_gpus=question.host_gpus, hosts=question.hosts,
        )  # fmt: skip
    except UserError as error:
        return {"refused": str(error).removeprefix("--")}
    return {"plan": plan_fields(result)}


def main() -> None:
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    print(json.dumps(answer(PlanRequest.model_validate_json(sys.stdin.read()))))  # noqa: T201


if __name__ == "__main__":
    main()
