"""The dead letters of a run as its API describes them."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from digenrl.client import Client

Letter = dict[str, Any]
"""A letter as `/v1/dead-letters/{number}` has it."""
PAGE = 200


class Now(NamedTuple):
    """Says where a run in progress is."""

    committed: int
    """Number of committed batches."""
    phase: str = "running"


@dataclass(frozen=True, slots=True)
class Desk:
    """Asks for letters."""

    client: Client
    is_live: bool = True
    """Whether the run is in progress."""

    def every(self, first: int = 1) -> list[Letter]:
        """Return all of the run from number ``first`` on, also those that are settled, the newest
        first."""
        found: list[Letter] = []
        while more := self.client.list_dead_letters(
            "all", PAGE, found[-1]["number"] if found else None
        ):
            found += [each.model_dump(mode="json") for each in more if each.number >= first]
            if more[-1].number <= first:
                break
        return found

    def letter(self, number: int) -> Letter:
        """Return a letter and its bytes; raises UserError if there is no such letter."""
        return self.client.get_dead_letter(number).model_dump(mode="json")

    def settle(self, number: int, action: Literal["retry", "drop"]) -> str:
        """Return what happens, in words; raises UserError if nothing would follow."""
        if action == "retry":
            return self.client.retry_dead_letter(number).note
        return self.client.drop_dead_letter(number).note

    def now(self) -> Now | None:
        """Return where the run is; None if it is not in progress."""
        if not self.is_live:
            return None
        run = self.client.get_run()
        return Now(run.step, run.phase)
