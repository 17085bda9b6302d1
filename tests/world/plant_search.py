"""Finds a seed at which each planted bug shows.

python -m tests.world.plant_search --tries 300 --log runs/plants.log      resumed by its log

A world is tried with many bugs at once: if nothing is wrong with it, none of them shows there. If
something is, as few of them are looked for as still lead to it, and the others are tried again. Two
bugs that show only together (`one+other`) are those of which each makes up for the other.
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
    """Of the bug, or of some with `+` between them."""
    seed: int
    violation: str
    """What was found; empty if the bug did not show."""


def drawn_worlds(seeds: int) -> list[Draw]:
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        prepare(Path(folder))
        return [draw(seed, Path(folder)) for seed in range(seeds)]


def try_seed(seed: int, names: Sequence[str]) -> list[Finding]:
    """Return for each bug whether it shows at a seed."""
    left, found = list(names), list[Finding]()
    while left:
        violations = run_seed(seed, plants=left).violations
        if not violations:
            return found + [Finding(name, seed, "") for name in left]
        if not found and not run_seed(seed).is_well:
            return found
        culprits = _culprits(seed, left, violations)
        found.append(culprits)
        left.remove(culprits.name.split("+")[0])
    return found


def _culprits(seed: int, names: Sequence[str], violations: Sequence[str]) -> Finding:
    """Return as few of some bugs as still lead to a violation."""
    kept, size = list(names), len(names)
    while size := size // 2:
        at = 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + size :]
            tried = run_seed(seed, plants=fewer).violations if fewer else ()
            if tried:
                kept, violations = fewer, tried
            else:
                at += size
    return Finding("+".join(kept), seed, "; ".join(violations))


def rounds(
    worlds: Sequence[Draw], tried: Counter[str], pairs: set[str], tries: int, most: int
) -> Iterator[tuple[int, list[str]]]:
    """Yield for each world the bugs that may show there, of those that are left at that moment."""
    for world in worlds:
        worth = {name: promises(name, world) for name in known() if tried[name] < tries}
        random = Random(f"{world.seed}/plants")
        chances = {
            name: each * random.random() / (1 + tried[name]) for name, each in worth.items() if each
        }
        chosen = sorted(chances, key=chances.__getitem__)[-most:]
        for pair in pairs:
            if set(pair.split("+")) <= set(chosen):
                chosen.remove(pair.split("+")[0])
        if chosen:
            yield world.seed, chosen


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
    pairs = {name for name in tried if "+" in name}
    _warm()
    with ProcessPoolExecutor(at_once, mp_context=_fork) as pool, log.open("a", 1) as file:
        searches = rounds(drawn_worlds(seeds)[first:], tried, pairs, tries, most)
        running = {pool.submit(try_seed, *at) for at in islice(searches, at_once)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in (finding for search in done for finding in search.result()):
                tried[each.name] += tries if each.violation else 1
                pairs |= {each.name} if "+" in each.name else set()
                line = f"{each.seed} {each.name} {each.violation[:300]}".replace("\n", " ")
                file.write(line.rstrip() + "\n")
                if each.violation:
                    sys.stdout.write(line + "\n")
                    sys.stdout.flush()
            running |= {pool.submit(try_seed, *at) for at in islice(searches, len(done))}


if __name__ == "__main__":
    typer.run(main)
