"""How far the evaluation of a run is, for people and for `digenrl up`."""

from dataclasses import dataclass, field

from fastapi import APIRouter


@dataclass(slots=True)
class Progress:
    evaluated: list[int] = field(default_factory=list)
    """Policy versions that have a record."""
    pending: list[int] | None = None
    """Versions that are due and have none, committed or not; None before the first look."""
    alarms: list[str] = field(default_factory=list)
    """Of all versions that this process has evaluated, oldest first."""


def routes(progress: Progress) -> APIRouter:
    router = APIRouter(tags=["evaluation"])

    @router.get("/v1/evaluation", operation_id="get_evaluation")
    def evaluation() -> Progress:
        """Which versions are evaluated, which are to be, and the alarms that were raised."""
        return progress

    return router
