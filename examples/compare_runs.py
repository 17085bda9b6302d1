"""Draw the reward curves of finished runs over one another, grouped by a schedule key.

    python examples/compare_runs.py runs/s0 runs/e0 --by max_staleness --out curves.png

Each run is a folder of `digenrl up`: recipe.json has its settings, summary.json its results.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich import print

COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--by", default="max_staleness", help="a key of the [schedule] table")
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    arguments = parser.parse_args()

    figure, axes = plt.subplots(figsize=(7, 4))
    seen: dict[str, str] = {}
    for folder in arguments.runs:
        recipe = json.loads((folder / "recipe.json").read_text())
        summary = json.loads((folder / "summary.json").read_text())
        label = f"{arguments.by} = {recipe['schedule'][arguments.by]}"
        colour = seen.get(label, COLOURS[len(seen) % len(COLOURS)])
        rewards = summary["reward_per_step"]
        steps = range(1, len(rewards) + 1)
        axes.plot(steps, rewards, color=colour, alpha=0.8, label=None if label in seen else label)
        seen[label] = colour
        gold = summary.get("gold_accuracy_after")
        print(
            f"{folder.name:16} {label:20} reward {summary['reward_after']:.3f}  "
            f"gold accuracy {'-' if gold is None else f'{gold:.3f}'}  {summary['wall_s']:.0f} s"
        )
    axes.set(xlabel="optimizer step", ylabel="mean training reward", title="reward per step")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=120)


if __name__ == "__main__":
    main()
