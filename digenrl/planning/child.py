"""Makes one plan in a process of its own, for the run's page: a question on stdin, JSON on stdout.

    python -m digenrl.planning.child < question.json

A question that cannot be planned is answered as well, with the reason. The process lets everything
else on its host go first, and ends at its limit of CPU time.
"""

import json
import os
import resource
import sys

from digenrl.planning.output import plan_fields
from digenrl.planning.plan import plan
from digenrl.planning.question import PlanRequest
from shared.errors import UserError
from shared.recipe.recipe import stored_recipe

CPU_S = 60


def answer(question: PlanRequest) -> dict[str, object]:
    """Return the plan, or the reason why there is no plan."""
    try:
        found = plan(
            stored_recipe(question.recipe.encode()), question.devices, profile=question.profile,
            staleness=question.staleness, host_gpus=question.host_gpus, hosts=question.hosts,
        )  # fmt: skip
    except UserError as error:
        return {"refused": str(error).removeprefix("--")}
    return {"plan": plan_fields(found)}


def main() -> None:
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    print(json.dumps(answer(PlanRequest.model_validate_json(sys.stdin.read()))))  # noqa: T201


if __name__ == "__main__":
    main()
