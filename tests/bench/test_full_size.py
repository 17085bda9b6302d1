"""The full-size model in miniature: its folder, its recipe, and what is seen of its processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.full_size.model import write_model
from bench.full_size.on_cpu import CHANGES, TINY_SHAPE
from bench.full_size.recipe import write_recipe
from bench.full_size.watch import OTHERS, memory_of, role_of
from digenrl.local.checking.inputs import check_inputs
from shared.diffusion.policy import load_policy
from shared.errors import UserError
from shared.recipe.recipe import load_recipe


def test_a_folder_without_t5_is_written_once_and_loads(tmp_path: Path) -> None:
    said: list[str] = []
    model = tmp_path / "model"
    for _ in range(2):
        write_model(model, tiny=True, report=said.append)
    assert "transformer" in said[0] and said[1] == f"{model} is there"
    recipe = load_recipe(write_recipe(tmp_path, model, TINY_SHAPE, cpu=True, changes=CHANGES))
    check_inputs(recipe)
    loaded = load_policy(recipe, {"transformer", "text", "decoder"})
    conditions = loaded.model.encode("a handwritten five", guidance=4.5)
    assert conditions["text"].shape[1] == 77 + 128, "T5's tokens are zeros"
    assert float(conditions["text"][:, 77:].abs().max()) == 0


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(UserError, match="holds something else"):
        write_model(tmp_path, tiny=True, report=print)
    assert (tmp_path / "mine").read_text() == "kept"


def test_memory_of_a_process_and_of_what_it_has_started_is_counted_by_role() -> None:
    program = (
        "import time; held = bytearray(b'1') * 50_000_000; print('held', flush=True); "
        "time.sleep(60)"
    )
    argv = [sys.executable, "-c", program, "digenrl", "serve", "rollout"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        found = memory_of(os.getpid(), {})
    finally:
        child.kill()
        child.communicate()
    assert 50e6 < found["rollout"] < 90e6
    assert found[OTHERS] > 0, "this process"


def test_a_role_is_read_from_the_command_line() -> None:
    served = ["python", "-m", "digenrl", "serve", "trainer", "--worker", "trainer-0"]
    assert role_of(served) == "trainer"
    assert role_of(["python", "-m", "torch.distributed.run", "-m", "digenrl", *served[3:]]) == (
        "trainer"
    )
    assert role_of(["/usr/bin/nats-server", "--config", "x"]) == OTHERS
