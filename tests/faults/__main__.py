"""``python -m tests.faults``: one schedule by its seed, or a sweep over many."""

import sys

from services.scheduler.sim.history_events import line_of
from tests.faults.sweep import simulate, sweep


def main() -> None:
    words = sys.argv[1:]
    numbers = [int(word) for word in words] if all(map(str.isdecimal, words)) else []
    match numbers:
        case [seed]:
            _print_history(seed)
        case [first, count]:
            failures = sweep(first, count).failures
            sys.stdout.write("".join(f"{line}\n" for line in failures))
            sys.stdout.write(f"{len(failures)} of {count} schedules went wrong\n")
            sys.exit(1 if failures else 0)
        case _:
            sys.stderr.write("usage: python -m tests.faults SEED, or FIRST COUNT\n")
            sys.exit(2)


def _print_history(seed: int) -> None:
    cluster, outcome = simulate(seed)
    for fact in cluster.history.facts:
        sys.stdout.write(f"{line_of(fact)}\n")
    sys.stdout.write(f"finished: {outcome.finished}\n")
    for violation in outcome.violations:
        sys.stdout.write(f"VIOLATION: {violation}\n")


if __name__ == "__main__":
    main()
