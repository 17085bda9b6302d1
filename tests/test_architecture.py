"""What the layout promises."""

import ast
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

TORCH_FREE = [
    "digenrl.commands.cli",
    "bench.cli",
    "digenrl.evaluation.process",
    "digenrl.follow.steps",
    "digenrl.local.up",
    "digenrl.local.checking.preflight",
    "digenrl.local.checking.check",
    "services.scheduler.shell.service",
    "services.trainer.fluid.member",
    "services.rollout.service",
    "services.trainer.service",
    "services.reward.service",
]


def test_the_command_and_the_scheduler_never_import_torch() -> None:
    heavy = "{'torch', 'diffusers', 'transformers', 'sklearn'}"
    imports = ", ".join(TORCH_FREE)
    check = f"import sys, {imports}; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    ended = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_worker_loads_the_libraries_of_its_device_and_of_the_index_only_where_it_needs_them() -> (
    None
):
    imports = "services.reward.app, services.reward.service, services.trainer.fluid.member"
    unwanted = "{'diffusers', 'onnxruntime', 'redis', 'scipy', 'torch', 'torchao', 'transformers'}"
    check = f"import sys, {imports}; sys.exit(', '.join({unwanted} & set(sys.modules)) or 0)"
    ended = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_help_never_imports_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "digenrl", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0
    assert "digenrl.commands.cli" in ended.stderr
    assert "torch" not in ended.stderr


def test_the_scheduler_has_no_module_that_only_the_command_line_imports() -> None:
    rooms = [
        path for name in ("digenrl", "services", "shared") for path in (ROOT / name).rglob("*.py")
    ]
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in rooms}
    reached, found = set[str](), ["services.scheduler.shell.service"]
    while found:
        name = found.pop()
        if name in paths and name not in reached:
            reached.add(name)
            found += imported_by(paths[name])
    own = {name for name in paths if name.startswith("services.scheduler.")}
    assert {name for name in own - reached if not name.endswith("__init__")} == set()
    assert not any(name.startswith("digenrl.") for name in reached)


def imported_by(path: Path) -> list[str]:
    """Return the names of what a module imports: modules, and what may be modules."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names]
    return found


MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 40


@pytest.mark.parametrize("room", ["digenrl", "services", "shared"])
def test_files_and_functions_are_short(room: str) -> None:
    too_long = [
        f"{path.relative_to(ROOT)}{place}: {lines} lines"
        for path in sorted((ROOT / room).rglob("*.py"))
        for place, lines, limit in measured(path.read_text(), room == "digenrl")
        if lines > limit
    ]
    assert too_long == []


def measured(source: str, has_commands: bool) -> Iterator[tuple[str, int, int]]:
    """Yield each limit: where it applies, the number of lines, and the maximum. The parameters of a
    command of the command line are the declaration of its options, and do not count."""
    yield "", source.count("\n"), MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_command = has_commands and "typer." in ast.unparse(node.args)
            first = node.body[0].lineno if is_command else node.lineno
            lines = (node.end_lineno or node.lineno) - first + 1
            yield f" {node.name}", lines, MAX_FUNCTION_LINES


PUBLIC_PACKAGES = ["digenrl", "services", "shared"]


def test_no_two_modules_and_no_two_public_classes_of_a_package_share_a_name() -> None:
    paths = [path for name in PUBLIC_PACKAGES for path in (ROOT / name).rglob("*.py")]
    modules = [path.with_suffix("") for path in paths if not path.stem.startswith("__")]
    classes = [
        (path.parent, node.name)
        for path in paths
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    shared_with_parent = [each for each in modules if each.parent.with_name(each.name) in modules]
    shared_with_package = [each for each in modules if (each / "__init__.py").exists()]
    assert [*shared_with_parent, *shared_with_package] == []
    assert [each for each, times in Counter(classes).items() if times > 1] == []


def lint_imports(folder: Path) -> "subprocess.CompletedProcess[str]":
    script = Path(sys.executable).parent / "lint-imports"
    return subprocess.run([script, "--no-cache"], cwd=folder, capture_output=True, text=True)


def test_the_import_rules_hold_and_each_planted_violation_is_found(tmp_path: Path) -> None:
    for name in ("digenrl", "services", "shared", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    assert lint_imports(tmp_path).returncode == 0
    plants = {
        "shared.learning.seeds": "services.scheduler.core.state",
        "shared.store.objects": "shared.recipe.recipe",
        "services.rollout.rollout_engine": "services.trainer.engine.trainer_engine",
        "services.rollout.app": "shared.diffusion.generation",
        "services.scheduler.core.machine": "nats",
        "services.scheduler.shell.app": "torch",
    }
    for module, imported in plants.items():
        with (tmp_path / f"{module.replace('.', '/')}.py").open("a") as file:
            file.write(f"\nimport {imported}\n")
    broken = lint_imports(tmp_path)
    assert broken.returncode == 1
    for module, imported in plants.items():
        assert f"{module} -> {imported}" in " ".join(broken.stdout.split())
