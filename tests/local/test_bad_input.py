"""Bad input is one clear line and exit code 2, before anything is started."""

import contextlib
import io
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from digenrl.commands import cli
from digenrl.local.checking import preflight
from digenrl.local.checking.preflight import disk_bytes, versions_bytes
from digenrl.local.limits import MIN_FREE_BYTES
from shared.errors import UserError
from shared.recipe.recipe import load_recipe, override
from tests.paths import DIGITS, ROOT


def up(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in this process, which is spared the imports."""
    words, said = ["digenrl", "up", *arguments], io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        mock.patch.object(sys, "argv", words),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    assert isinstance(ended.value.code, int)
    return subprocess.CompletedProcess(words, ended.value.code, stderr=said.getvalue())


def test_the_command_of_a_process_ends_in_the_same_way() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "digenrl", "up", "nowhere.toml"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (2, up("nowhere.toml").stderr)


def recipe_with(tmp_path: Path, old: str, new: str) -> Path:
    text = DIGITS.read_text().replace('"../../', f'"{ROOT}/')
    assert old in text
    path = tmp_path / "recipe.toml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("clip_range", "clip_rnage", "did you mean clip_range?"),
        ('name = "digits"', 'name = "my run"', "run.name: use 1 to 64 letters, digits, '-' and"),
        ("fragment_size = ", "fragment_size = 1000", "nearest that do"),
        ("micro_batch = ", "micro_batch = 1000", "nearest that do"),
        ('/models/digits"', '/recipes"', "is not a diffusers model"),
        ('type = "digit-probability"', 'type = "magic"', "known are: aesthetic, clip-score, "),
        ("digits.prompts.jsonl", "nowhere.jsonl", "cannot be read"),
        ("[evaluation]", "[evaluation]\nwidth = 7", "evaluation.width: 7 is not a multiple of 2"),
        ("[evaluation]", "[evaluation]\nheight = 16", "evaluation.height: 16 is more than this"),
        (
            "height = 8",
            "height = 8\nframes = 5",
            f"model.frames: {ROOT}/models/digits makes images",
        ),
        (
            '"digit-probability"',
            '"temporal-consistency"',
            f"temporal-consistency scores videos, and {ROOT}/models/digits makes images",
        ),
    ],
)
def test_a_faulty_recipe(tmp_path: Path, old: str, new: str, said: str) -> None:
    runs = tmp_path / "runs"
    ended = up(str(recipe_with(tmp_path, old, new)), "--runs", str(runs))
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.startswith("digenrl: ")
    assert ended.stderr.count("\n") == 1
    assert not runs.exists()


@pytest.mark.parametrize(
    ("sigmas", "said"),
    [
        ("[1.0, 0.5, 0.0]", "sampling.sigmas: 3 numbers; 4 steps need 5"),
        ("[1.0, 0.5, 0.6, 0.2, 0.0]", "every number must be smaller than the one before"),
        ("[1.0, 0.8, 0.6, 0.4, 0.2]", "the last number must be 0, not 0.2"),
        ('"liner"', "sampling.sigmas: "),
    ],
)
def test_faulty_sigmas(tmp_path: Path, sigmas: str, said: str) -> None:
    text = f"steps = 4\nsigmas = {sigmas}\nwindow = 2\nnoise_level"
    path = recipe_with(tmp_path, "[sampling]", "[sampling]")
    lines = path.read_text().split("[sampling]")[1].split("\n[")[0]
    path.write_text(path.read_text().replace(lines, "\n" + text + " = 0.7\n"))
    with pytest.raises(UserError, match=re.escape(said)):
        load_recipe(path)


def test_an_occupied_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = up(str(DIGITS), "--port", str(port), "--runs", str(tmp_path / "runs"))
    assert ended.returncode == 2
    assert f"--port: {port} is occupied" in ended.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--port", "99999"), "'--port': Input should be less than or equal to 65535"),
        (("--steps", "0"), "run.steps"),
        (("--resume",), "contains no run"),
    ],
)
def test_a_faulty_option(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    ended = up(str(DIGITS), *words, "--runs", str(tmp_path / "runs"))
    assert ended.returncode == 2
    assert said in ended.stderr


def test_prompts_of_the_evaluation_are_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n")
    ended = up(str(DIGITS), "--evaluation.prompts", str(tmp_path / "p.txt"))
    assert ended.returncode == 2
    assert "digenrl: evaluation.prompts: " in ended.stderr and "holds no prompt" in ended.stderr


def request(runs: Path, *, resume: bool = False) -> preflight.UpRequest:
    return preflight.UpRequest(DIGITS, {}, resume=resume, port=0, runs=runs)


def test_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "MIN_FREE_BYTES", 1 << 60)
    with pytest.raises(UserError, match="free space"):
        preflight.prepare(request(tmp_path / "runs"))


def test_no_space_for_the_versions_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"run.keep_every": 1}
    recipe = override(load_recipe(DIGITS), changes)
    needed = MIN_FREE_BYTES + disk_bytes(recipe)
    usage = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"for weights, checkpoints and.*run\.keep_last"):
        preflight.prepare(preflight.UpRequest(DIGITS, changes, False, 0, tmp_path / "runs"))
    usage.free = needed
    lock = preflight.prepare(request(tmp_path / "runs")).lock
    lock.close()


def test_a_key_over_what_the_algorithm_s_name_implies_is_reported_at_the_start(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    changes = {"algorithm.name": "dance-grpo", "sampling.variant": "flow"}
    asked = preflight.UpRequest(DIGITS, changes, False, 0, tmp_path / "runs", say=lines.append)
    with pytest.raises(UserError):  # dance-grpo has no windows, and this recipe has
        preflight.prepare(asked)
    asked = preflight.UpRequest(DIGITS, {}, False, 0, tmp_path / "runs", say=lines.append)
    preflight.prepare(asked).lock.close()
    wanted = "algorithm.clip_range = 0.002 in place of 0.0001, which flow-grpo implies"
    assert wanted in lines
    assert not [line for line in lines if " in place of " not in line]


@pytest.mark.parametrize("changes", [{}, {"run.steps": 2}, {"model.trained": "full"}])
def test_a_run_needs_what_its_store_writes_between_two_sweeps(changes: dict[str, object]) -> None:
    """.3 of a volume may be deleted bytes, and a minute's writes have not been swept."""
    changes |= {"algorithm.kl_beta": 0.0}
    recipe = override(load_recipe(DIGITS), changes)
    short = override(recipe, {"run.steps": 1, "run.keep_last": 1, "evaluation.every": None})
    step = disk_bytes(short) - versions_bytes(short) / 0.7  # all that one step writes
    written = min(recipe.run.steps, 60) * step
    assert disk_bytes(recipe) == pytest.approx(versions_bytes(recipe) / 0.7 + written, rel=1e-3)
    assert disk_bytes(recipe) >= 1.4 * versions_bytes(recipe) + step


def test_a_run_that_goes_on_elsewhere(tmp_path: Path) -> None:
    first = preflight.prepare(request(tmp_path))
    with pytest.raises(UserError, match="in progress in another process"):
        preflight.prepare(request(tmp_path))
    first.lock.close()
