"""Finds a seed at which each planted bug shows.

python -m tests.world.plant_search --tries 300 --log runs/plants.log      resumed by its log

A world is tried with many bugs at once: if nothing is wrong with it, none of them shows there. If
something is, halves and quarters of them tell which one it was; the others are tried again.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from tests.world.draws import Draw, draw, prepare
from tests.world.plants import known, promises
from tests.world.sweep import _fork, _warm, run_seed


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    seed: int
    violation: str
    """What was found; empty if the bug did not show."""


def drawn_worlds(seeds: int) -> list[Draw]:
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        prepare(Path(folder))
        return [draw(seed, Path(folder)) for seed in range(seeds)]


def try_seed(seed: int, names: Sequence[str]) -> list[Finding]:
    """Return for each bug whether it shows at a seed; for none, if others hide it."""
    left, found, is_well = list(names), list[Finding](), None
    while left:
        violations = run_seed(seed, plants=left).violations
        if not violations:
            return found + [Finding(name, seed, "") for name in left]
        is_well = run_seed(seed).is_well if is_well is None else is_well
        culprit = _culprit(seed, left) if is_well else None
        if culprit is None:
            return found
        found.append(culprit)
        left.remove(culprit.name)
    return found


def _culprit(seed: int, names: Sequence[str]) -> Finding | None:
    """Return one of some bugs that lead to a violation together; None if no half of them does."""
    while True:
        middle = len(names) // 2
        for half in (names[:middle], names[middle:]) if middle else (names,):
            violations = run_seed(seed, plants=half).violations
            if violations and len(half) == 1:
                return Finding(half[0], seed, "; ".join(violations))
            if violations:
                names = half
                break
        else:
            return None


def rounds(
    worlds: Sequence[Draw], tried: Counter[str], tries: int, most: int
) -> Iterator[tuple[int, list[str]]]:
    """Yield for each world the bugs that may show there, of those that are left at that moment."""
    for world in worlds:
        worth = {name: promises(name, world) for name in known() if tried[name] < tries}
        random = Random(f"{world.seed}/plants")
        chances = {
            name: each * random.random() / (1 + tried[name]) for name, each in worth.items() if each
        }
        if chances:
            yield world.seed, sorted(chances, key=chances.__getitem__)[-most:]


def main(
    seeds: Annotated[int, typer.Option(help="of which one is looked for")] = 2000,
    first: Annotated[int, typer.Option(help="the first of them")] = 0,
    tries: Annotated[int, typer.Option(help="so many for each bug at most")] = 2000,
    most: Annotated[int, typer.Option(help="so many bugs in a world")] = 12,
    log: Annotated[Path, typer.Option(help="gets a line per try: seed, bug, violation")] = Path(
        "runs/plants.log"
    ),
    only: Annotated[str, typer.Option(help="names begin so")] = "",
    at_once: Annotated[int, typer.Option(help="processes")] = 2,
) -> None:
    tried = Counter({name: 0 if name.startswith(only) else tries for name in known()})
    log.parent.mkdir(parents=True, exist_ok=True)
    for line in log.read_text().splitlines() if log.exists() else ():
        _, name, *violation = line.split(" ", 2)
        tried[name] += tries if violation else 1
    _warm()
    with ProcessPoolExecutor(at_once, mp_context=_fork) as pool, log.open("a", 1) as file:
        searches = rounds(drawn_worlds(seeds)[first:], tried, tries, most)
        running = {pool.submit(try_seed, *at) for at in islice(searches, at_once)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in (finding for search in done for finding in search.result()):
                tried[each.name] += tries if each.violation else 1
                line = f"{each.seed} {each.name} {each.violation[:300]}".replace("\n", " ")
                file.write(line.rstrip() + "\n")
                if each.violation:
                    sys.stdout.write(line + "\n")
                    sys.stdout.flush()
            running |= {pool.submit(try_seed, *at) for at in islice(searches, len(done))}


if __name__ == "__main__":
    typer.run(main)
