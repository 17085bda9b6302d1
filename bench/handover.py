"""How fast devices change hands in a run: RETURN of lent devices, and adoption of new weights.

Reads the run's logs: how long after the command a lent device was free for training, in
milliseconds and in denoising steps of that moment, and how long rollout workers paused between two
fragments to put staged weights in use.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def entries(folder: Path, event: str) -> Iterable[dict[str, Any]]:
    for log in sorted((folder / "logs").glob("*.log")):
        for line in log.read_text(errors="replace").splitlines():
            if f'"{event}"' in line:
                yield json.loads(line)


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "count": len(ordered),
        **{f"p{p}": ordered[min(len(ordered) - 1, p * len(ordered) // 100)] for p in (50, 95, 99)},
        "max": ordered[-1],
    }


def figures(run: Path) -> dict[str, dict[str, float]]:
    """Returns percentiles of what the logs of a run's folder tell."""
    returns = [entry for entry in entries(run, "device_returned") if entry["step_ms"]]
    pauses = [entry["pause_ms"] for entry in entries(run, "policy_adopted")]
    found = {}
    if returns:
        found["return_ms"] = percentiles([entry["ms"] for entry in returns])
        found["return_steps"] = percentiles([e["ms"] / e["step_ms"] for e in returns])
    if pauses:
        found["adoption_pause_ms"] = percentiles(pauses)
    return found
