"""Request of the run's page to the process that plans for it (`digenrl.planning.child`)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

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
