"""Runs many seeds, each in a process of its own that is forked when everything is imported."""

import contextlib
import gc
import multiprocessing
import resource
import sys
import tempfile
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import cache
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

from tests.world.draws import prepare
from tests.world.plants import planted
from tests.world.run import Outcome, live

MOST_CPU_S = 120
"""CPU seconds that a seed may take, however many others share the machine."""
WARMING = 0
"""World that a process lives through before it forks any: first uses of libraries cost 200 ms."""
_fork = multiprocessing.get_context("fork")


def run_seed(
    seed: int, *, kept: Collection[int] | None = None, plants: Collection[str] = ()
) -> Outcome:
    """Run a seed in a process of its own: nothing of one world reaches another.

    Args:
        kept: numbers of the faults that strike; None: all.
        plants: names of planted bugs (`tests.world.plants`).
    """
    _warm()
    ours, theirs = _fork.Pipe(duplex=False)
    child = _fork.Process(target=_child, args=(theirs, seed, kept, plants))
    child.start()
    theirs.close()
    try:
        found: Outcome = ours.recv()
        return found
    except EOFError:
        return _failed(seed, f"its process died, or has taken {MOST_CPU_S} s of CPU time")
    finally:
        child.kill()
        child.join()
        ours.close()


@cache
def _warm() -> None:
    with _folder(), _quiet():
        live(WARMING, Path())
        gc.collect()
    gc.freeze()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what Python says of coroutines that a world leaves where they stand."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    """Be in a folder with what all worlds read: recipes have paths, which must be the same."""
    with tempfile.TemporaryDirectory(prefix="world-") as folder, contextlib.chdir(folder):
        prepare(Path())
        yield


def _child(
    pipe: Connection, seed: int, kept: Collection[int] | None, plants: Collection[str]
) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    gc.disable()  # what a world leaves is not even looked at
    with _folder(), _quiet(), planted(plants):
        try:
            kept = None if kept is None else frozenset(kept)
            outcome = live(seed, Path(), kept, is_last=True)
        except Exception:
            outcome = _failed(seed, traceback.format_exc())
    pipe.send(outcome)


def _failed(seed: int, why: str) -> Outcome:
    return Outcome(seed, (why,), (), "", 0.0, 0.0, ())


def run_seeds(
    seeds: Iterable[int], *, at_once: int = 2, plants: Collection[str] = ()
) -> Iterator[Outcome]:
    """Yield outcomes as seeds end, without their logs."""
    left = iter(seeds)
    _warm()
    with ProcessPoolExecutor(at_once, mp_context=_fork) as pool:
        running = {pool.submit(_brief, seed, plants) for seed in islice(left, at_once)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(_brief, seed, plants) for seed in islice(left, len(done))}
            yield from (each.result() for each in done)


def _brief(seed: int, plants: Collection[str]) -> Outcome:
    outcome = run_seed(seed, plants=plants)
    return replace(outcome, log=())


def shortened(outcome: Outcome, *, plants: Collection[str] = ()) -> Outcome:
    """Return a run of the same seed with as few of its faults as still lead to a violation: halves,
    quarters and so on are left out, as long as one of them can be."""
    kept = [fault.number for fault in outcome.faults]
    size = len(kept)
    while size >= 1:
        at = 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + size :]
            tried = run_seed(outcome.seed, kept=fewer, plants=plants)
            if tried.is_well:
                at += size
            else:
                kept, outcome = fewer, tried
        size //= 2
    return outcome
