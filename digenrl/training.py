"""Trains a model from another program: writes a recipe and runs `digenrl up` in a child process."""

import atexit
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from digenrl.api.client import Client
from digenrl.reward_server import Reward, RewardServer

COMMAND = [sys.executable, "-P", "-m", "digenrl"]
DEFAULTS: Mapping[str, Any] = {
    "run.steps": 100, "model.height": 512, "model.width": 512, "sampling.window": 2,
    "batch.groups": 8, "batch.group_size": 8, "trainer.learning_rate": 1e-4,
}  # fmt: skip
"""Keys that a recipe needs, where none is the base."""
POLL_S = 0.5
MAX_LINES = 20
"""Last lines of the output that an error quotes."""

Prompts = Sequence[str | Mapping[str, Any]] | str | Path
RewardSource = Reward | Mapping[str, Any] | str | Path


class TrainingFailed(Exception):
    """The recipe was refused, or the run has ended without a result."""


class Progress(NamedTuple):
    state: str = "starting"
    """starting, running, paused, reporting, finished, stopped or failed."""
    step: int = 0
    """Optimizer steps committed."""
    steps: int | None = None
    reward: float | None = None
    """Mean reward of the newest committed batch."""


class Result(NamedTuple):
    adapter: Path
    """Folder of the adapter, which diffusers loads."""
    summary: dict[str, Any]
    """Measurements of the run, as docs/summary.md defines them."""


@dataclass(slots=True)
class Training:
    """A run in progress, or one that has ended."""

    folder: Path
    """Folder of the run's results."""
    output: Path
    """File with what `digenrl up` prints."""
    process: "subprocess.Popen[bytes]"
    server: RewardServer | None
    began: float

    @property
    def progress(self) -> Progress:
        state = self.folder / "state.json"
        try:
            is_new = state.stat().st_mtime >= self.began
            return Progress(**json.loads(state.read_text())) if is_new else Progress()
        except (OSError, ValueError):
            return Progress()

    def client(self) -> Client:
        """Return a client of the run's API, also after the end."""
        return Client.open(self.folder)

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end, and return the result.

        Raises:
            TimeoutError: if the run has not ended within this time.
            TrainingFailed: if it has no result; its cause is the reward function's error, if any.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.process.poll() is None:
            if self.server and self.server.error and self.progress.state == "paused":
                self.stop()
            elif deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.folder.name}: {self.progress}")
            time.sleep(POLL_S)
        self._close()
        adapter = self.folder / "adapter"
        error = None if self.server is None else self.server.error
        if self.progress.state != "finished" or not adapter.is_dir():
            lines = self.output.read_text(errors="replace").splitlines()[-MAX_LINES:]
            raise TrainingFailed("\n".join(lines)) from error
        return Result(adapter, json.loads((self.folder / "summary.json").read_text()))

    def stop(self) -> None:
        """End the run; the same call of `train` resumes it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.process.wait()
        self._close()

    def _close(self) -> None:
        atexit.unregister(self.stop)
        if self.server is not None:
            self.server.close()


def train(
    *,
    model: str | Path | None = None, prompts: Prompts, reward: RewardSource,
    recipe: str | Path | None = None, name: str = "train",
    keys: Mapping[str, Any] | None = None, runs: str | Path | None = None,
) -> Training:  # fmt: skip
    """Begin to train on this machine, as `digenrl up` does; an unfinished run of the name resumes.

    Args:
        model: folder of a diffusers model, or its name on the hub; None: ``recipe``'s.
        prompts: texts, rows as a file of JSON lines has them, or a file as `data.prompts` names it.
        reward: a function of this process (`digenrl.reward_server`), a file with one, such as
            "my_reward.py:score", or a table such as {"name": "text", "type": "ocr"}.
        recipe: file, or name of a recipe that comes with DigenRL, whose keys are the defaults.
        keys: values of other keys, such as {"run.steps": 50}.
        runs: folder of runs, by default DIGENRL_RUNS or `runs`.

    Raises:
        TrainingFailed: if the recipe is refused; it has the line that names the key.
        Exception: error of a reward function, for one sample of noise.
    """
    root = Path(runs or os.environ.get("DIGENRL_RUNS") or "runs").resolve()
    inputs = root / f"{name}.inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    file, rows = inputs / "recipe.toml", _prompts_file(prompts, inputs / "prompts.jsonl")
    server = RewardServer(reward, _earlier_port(file)) if callable(reward) else None
    named = {} if model is None else model_key(model)
    tables = {"run.name": name, **named, "data.prompts": rows}
    tables["reward.scorers"] = [_scorer(reward, server, inputs)]
    try:
        _write(file, recipe, {**tables, **(keys or {})})
        shown = json.loads(_run("recipe", "show", str(file), "--json"))
        if server is not None:
            _check(server, {each["key"]: each["value"] for each in shown}, rows)
        return _started(root / name, file, server)
    except BaseException:
        if server is not None:
            server.close()
        raise


def _prompts_file(prompts: Prompts, file: Path) -> Path:
    if isinstance(prompts, str | Path):
        return Path(prompts).resolve()
    rows = [{"prompt": each} if isinstance(each, str) else each for each in prompts]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def _write(file: Path, base: str | Path | None, tables: Mapping[str, Any]) -> None:
    """Write a recipe, and fetch the model that it names on the hub."""
    if base is None:
        device = {} if _has_gpu() else {"model.device": "cpu"}
        tables = {**DEFAULTS, **device, **tables}
    else:  # one that comes with DigenRL has no file here
        tables = {"base": Path(base).resolve() if Path(base).exists() else base, **tables}
    file.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in tables.items()))
    if "model.id" in tables:
        _run("fetch", str(file))


def _started(folder: Path, file: Path, server: RewardServer | None) -> Training:
    began, output = time.time(), file.with_name("up.log")
    argv = [*COMMAND, "up", str(file), "--runs", str(folder.parent)]
    with output.open("wb") as printed:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed)
    training = Training(folder, output, process, server, began)
    atexit.register(training.stop)
    return training


def _run(*words: str) -> str:
    ended = subprocess.run([*COMMAND, *words], capture_output=True, text=True)
    if ended.returncode:
        raise TrainingFailed(ended.stderr.strip().removeprefix("digenrl: "))
    return ended.stdout


def model_key(model: str | Path) -> dict[str, str]:
    """Return the key that names a model: a folder, or ORG/NAME on the hub."""
    is_id = isinstance(model, str) and model.count("/") == 1 and not Path(model).exists()
    return {"model.id": str(model)} if is_id else {"model.folder": str(Path(model).resolve())}


def _scorer(reward: RewardSource, server: RewardServer | None, inputs: Path) -> Mapping[str, Any]:
    """Return the table of a scorer."""
    if isinstance(reward, Mapping):
        return reward
    if isinstance(reward, str | Path):
        return {"name": "reward", "type": "python", "source": str(Path(reward).resolve())}
    if server is None:
        raise TypeError("reward: give a function, a file.py:function, or one table of a scorer")
    key = inputs / "reward.key"
    key.touch(mode=0o600)
    key.write_text(server.token)
    remote = {"key_file": str(key)}
    return {"name": "reward", "type": "remote", "url": server.url, "remote": remote}


def _earlier_port(file: Path) -> int:
    """Return the port of the recipe's reward, by which an unfinished run resumes; 0: any port."""
    match = re.search(r"http://127\.0\.0\.1:(\d+)", file.read_text()) if file.exists() else None
    return int(match[1]) if match else 0


def _check(server: RewardServer, keys: Mapping[str, Any], prompts: Path) -> None:
    """Call the reward function on noise of the size of a sample; raises what it raises."""
    import numpy as np

    frames = [keys["model.frames"]] if keys["model.frames"] > 1 else []
    shape = (*frames, keys["model.height"], keys["model.width"], 3)
    row = _first_row(prompts)
    if row is not None:
        metadata = {"prompt": row["prompt"], **row.get("metadata", row)}
        server.score(np.random.default_rng(0).integers(0, 256, shape, np.uint8), metadata)


def _first_row(prompts: Path) -> Mapping[str, Any] | None:
    """Return the first row of a text file or of JSON lines; None for other files.

    Raises:
        TrainingFailed: if the file cannot be read, or is empty.
    """
    if prompts.suffix not in (".txt", ".jsonl"):
        return None
    try:
        lines = [line for line in prompts.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise TrainingFailed(f"prompts: {prompts} cannot be read: {error.strerror}") from error
    if not lines:
        raise TrainingFailed(f"prompts: {prompts} holds no prompt; give one at least")
    row: Mapping[str, Any] = json.loads(lines[0]) if prompts.suffix == ".jsonl" else {}
    return row or {"prompt": lines[0]}


def _has_gpu() -> bool:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible.strip() not in ("", "-1")
    return shutil.which("nvidia-smi") is not None


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
