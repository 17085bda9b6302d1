"""Starts the evaluator of a local run, shows its alarms, and waits for it at the end."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import httpx

from digenrl.local.limits import EVALUATION_POLL_S, EVALUATOR_TIMEOUT_S
from digenrl.local.processes.program import Program, is_ready
from digenrl.local.processes.supervisor import Supervisor
from digenrl.local.running.command_lines import command
from digenrl.local.running.display import Display
from digenrl.planning.entries import EVALUATOR

EVALUATOR_NICENESS = 19
"""Niceness of the evaluator, which takes the CPU time that the services leave."""


@dataclass(slots=True)
class LocalEvaluation:
    """Manages the evaluator of a run whose recipe sets `evaluation.every`."""

    run: str
    port: int
    supervisor: Supervisor
    client: httpx.AsyncClient
    display: Display
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the evaluator, in addition to the inherited ones."""
    shown_alarms: set[str] = field(default_factory=set)
    """Alarms that have been shown."""

    async def start(self) -> None:
        """Start the evaluator, unless it is started; the store must have the run's recipe."""
        if EVALUATOR in self.supervisor.children:
            return
        argv = command(
            "evaluate", "--run", self.run, "--worker", EVALUATOR,
            "--nice", str(EVALUATOR_NICENESS), "--port", str(self.port), "--stay",
        )  # fmt: skip
        program = Program(
            name=EVALUATOR,
            argv=argv,
            environment=dict(self.environment),
            ready=partial(is_ready, self._url),
            optional=True,
        )
        await self.supervisor.start(program, wait=False)

    async def look(self) -> list[int] | None:
        """Show new alarms. Returns the versions that are still to be evaluated, or None if the
        evaluator does not answer or has not looked yet."""
        try:
            answer = await self.client.get(
                f"{self._url}/v1/evaluation", timeout=EVALUATOR_TIMEOUT_S
            )
            answered = answer.raise_for_status().json()
        except httpx.HTTPError:
            return None
        for alarm in answered["alarms"]:
            if alarm not in self.shown_alarms:
                self.shown_alarms.add(alarm)
                self.display.warn(f"reward hacking? {alarm}")
        pending: list[int] | None = answered["pending"]
        return pending

    async def finish(self) -> None:
        """Wait until all due versions are evaluated, or the evaluator is given up."""
        while self.supervisor.is_kept(EVALUATOR):
            pending = await self.look()
            if pending == []:
                return
            note = "evaluating version " + ", ".join(map(str, pending or []))
            if pending and note != self.display.note:
                self.display.say(note)
            await asyncio.sleep(EVALUATION_POLL_S)

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}"
