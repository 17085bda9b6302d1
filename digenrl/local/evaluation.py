"""The evaluator beside a local run: started with it, listened to, and waited for at the end."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

from digenrl.local.brokers import Program
from digenrl.local.display import Display
from digenrl.local.gpus import EVALUATOR
from digenrl.local.processes import command
from digenrl.local.supervisor import Supervisor

POLL_S = 0.5
ANSWER_S = 2.0
"""An evaluator that takes longer to answer is asked again later: the display does not wait."""
NICE = 19
"""It takes what the services leave of the CPU."""


@dataclass(slots=True)
class LocalEvaluation:
    """Of a run whose recipe sets `evaluation.every`."""

    run: str
    port: int
    supervisor: Supervisor
    client: httpx.AsyncClient
    display: Display
    environment: Mapping[str, str] = field(default_factory=dict)
    """Besides what it inherits."""
    told: set[str] = field(default_factory=set)
    """Alarms that were shown."""

    async def start(self) -> None:
        """Once, when the store has the run's recipe."""
        if EVALUATOR in self.supervisor.children:
            return
        argv = command(
            "evaluate", "--run", self.run, "--worker", EVALUATOR,
            "--nice", str(NICE), "--port", str(self.port), "--stay",
        )  # fmt: skip
        program = Program(
            name=EVALUATOR,
            argv=argv,
            environment=dict(self.environment),
            ready=self._ready,
            optional=True,
        )
        await self.supervisor.start(program, wait=False)

    async def look(self) -> list[int] | None:
        """Show alarms that are new; returns the versions that are still to be evaluated, or None
        while the evaluator does not say."""
        try:
            answer = await self.client.get(f"{self._url}/v1/evaluation", timeout=ANSWER_S)
            told = answer.raise_for_status().json()
        except httpx.HTTPError:
            return None
        for alarm in told["alarms"]:
            if alarm not in self.told:
                self.told.add(alarm)
                self.display.warn(f"reward hacking? {alarm}")
        pending: list[int] | None = told["pending"]
        return pending

    async def finish(self) -> None:
        """Wait until every version that is due is evaluated, or the evaluator is given up."""
        while self.supervisor.is_kept(EVALUATOR):
            pending = await self.look()
            if pending == []:
                return
            note = "evaluating version " + ", ".join(map(str, pending or []))
            if pending and note != self.display.note:
                self.display.say(note)
            await asyncio.sleep(POLL_S)

    async def _ready(self) -> bool:
        return (await self.client.get(f"{self._url}/readyz")).status_code == 200

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
