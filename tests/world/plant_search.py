"""Finds for each planted bug the first seed at which it shows.

python -m tests.world.plant_search --tries 30 --log runs/plants.log      resumed by its log
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Annotated

import typer

from tests.world.draws import Draw, draw, prepare
from tests.world.plants import known, promises
from tests.world.sweep import _fork, run_seed


def drawn_worlds(seeds: int) -> list[Draw]:
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        prepare(Path(folder))
        return [draw(seed, Path(folder)) for seed in range(seeds)]


def most_promising(name: str, worlds: Sequence[Draw]) -> list[int]:
    """Return the seeds at which a plant may show, those that promise most first."""
    worth = {each.seed: promises(name, each) for each in worlds}
    return sorted(filter(worth.get, worth), key=lambda seed: (-worth[seed], seed))


def first_seed(name: str, seeds: Sequence[int]) -> tuple[int | None, str, float]:
    """Return the first seed with a violation that the world without the plant has not, the
    violation, and the seconds that it took."""
    began = time.monotonic()
    for seed in seeds:
        outcome = run_seed(seed, plant=name)
        if not outcome.is_well and run_seed(seed).is_well:
            return seed, "; ".join(outcome.violations), time.monotonic() - began
    return None, "not found", time.monotonic() - began


def main(
    seeds: Annotated[int, typer.Option(help="of which one is looked for")] = 2000,
    tries: Annotated[int, typer.Option(help="so many for each bug at most")] = 2000,
    log: Annotated[Path, typer.Option(help="gets a line per bug: seed, name, violation")] = Path(
        "runs/plants.log"
    ),
    only: Annotated[str, typer.Option(help="names begin so")] = "",
    at_once: Annotated[int, typer.Option(help="processes")] = 2,
) -> None:
    done: dict[str, int] = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        found, upto, name, *_ = line.split(" ", 3)
        done[name] = tries if found != "-" else max(int(upto), done.get(name, 0))
    log.parent.mkdir(parents=True, exist_ok=True)
    wanted = [n for n in known() if n.startswith(only) and done.get(n, 0) < tries]
    worlds = drawn_worlds(seeds)
    with ProcessPoolExecutor(at_once, mp_context=_fork) as pool:
        searches = {}
        for name in wanted:
            left = most_promising(name, worlds)[done.get(name, 0) : tries]
            searches[pool.submit(first_seed, name, left)] = name
        for search in as_completed(searches):
            seed, what, seconds = search.result()
            at = [("-" if seed is None else f"{seed}"), f"{tries}", searches[search]]
            line = f"{' '.join(at)} {seconds:.1f} s: {what[:300]}"
            with log.open("a") as file:
                file.write(line.replace("\n", " ") + "\n")
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
