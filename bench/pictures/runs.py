"""Short runs whose pages are photographed: finished, failed, in progress, and of videos."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import ROOT
from digenrl.local.runs import read_progress

DIGITS = ROOT / "recipes" / "digits.toml"
FINISHED, LOW_RATE, FAILED, VIDEO = "digits", "digits-low-rate", "digits-broken", "video"
RUNNING = "digits-running"
RUNNING_STEPS = 6
"""Steps after which a run in progress has pictures, curves and a timeline."""
TIMEOUT_S = 900
REWARDS = {
    "broken.py": """\
import itertools

CALLS = itertools.count()


def score(image, prompt):
    if next(CALLS) > 1200:
        raise ValueError("the judge has no weights for this picture")
    return float(image.mean()) / 255
""",
    "red.py": """\
def score(image, prompt):
    red, green, blue = image.reshape(-1, 3).mean(0) / 255
    return float(100 * (red - (green + blue) / 2))
""",
}


def make_runs(folder: Path) -> None:
    """Make the runs that the folder lacks: about five minutes on two cores."""
    for name, text in REWARDS.items():
        (folder.parent / name).write_text(text)
    broken = f'[{{name = "ink", type = "python", source = "{folder.parent / "broken.py"}"}}]'
    _finish(folder, FINISHED, [str(DIGITS), "--steps", "24", "--evaluation.every", "4"])
    _finish(folder, LOW_RATE, [str(DIGITS), "--steps", "12", "--trainer.learning_rate", "0.001",
                               "--evaluation.every", "4"])  # fmt: skip
    _finish(folder, FAILED, [str(DIGITS), "--reward.scorers", broken, "--evaluation.every", "2"])
    _finish(folder, VIDEO, [str(_video_recipe(folder.parent)), "--evaluation.every", "4"])


def _finish(folder: Path, name: str, words: Sequence[str]) -> None:
    if not (folder / name).is_dir():
        print(f"run {name}", flush=True)  # noqa: T201 -- minutes without another sign
        subprocess.run(_up(folder, name, words), timeout=TIMEOUT_S, check=name != FAILED,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip


def _up(folder: Path, name: str, words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "digenrl", "up", *words, "--runs", str(folder), "--run", name]


def _video_recipe(folder: Path) -> Path:
    """Return a recipe of a small video model with random weights, which learns a colour."""
    from tests import tiny_models

    recipe = folder / "video.toml"
    if not recipe.is_file():
        model = tiny_models.save("wan", folder / "tiny-wan")
        words = ["init", "--model", str(model), "--reward", str(folder / "red.py"), "--out"]
        words += [str(recipe), "--no-samples"]
        for prompt in ("a red fox in the snow", "a kite over the sea", "a lamp in a window"):
            words += ["--prompts", prompt]
        subprocess.run([sys.executable, "-m", "digenrl", *words], check=True)
    return recipe


@contextlib.contextmanager
def run_in_progress(folder: Path) -> Iterator[None]:
    """Keep a run in progress, which has taken some steps."""
    shutil.rmtree(folder / RUNNING, ignore_errors=True)  # its steps would count
    words = [str(DIGITS), "--steps", "400", "--evaluation.every", "3"]
    process = subprocess.Popen(
        _up(folder, RUNNING, words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while read_progress(folder / RUNNING).step < RUNNING_STEPS:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{RUNNING} took no {RUNNING_STEPS} steps")
            time.sleep(1)
        yield
    finally:
        os.kill(process.pid, signal.SIGINT)
        process.wait(TIMEOUT_S)
