"""Forked processes run every test once, and what they find is reported as pytest does."""

import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

FILES = {
    "test_good.py": """
        import os, pytest
        @pytest.mark.parametrize("number", range(5))
        def test_each_writes_its_own(number, tmp_path, capfd):
            os.write(1, b"%d" % number)
            assert capfd.readouterr().out == str(number)
            (tmp_path / "file").write_text("")
    """,
    "test_bad.py": """
        import pytest
        def test_fails(): assert 1 == 2
        def test_fails_at_its_end(broken): pass
        @pytest.fixture
        def broken():
            yield
            raise ValueError("at the end")
        @pytest.mark.skip
        def test_is_skipped(): pass
    """,
    "test_dead.py": """
        import os
        def test_ends_its_process(): os._exit(3)
        def test_comes_after_it(): pass
    """,
    "test_other.py": """
        import os
        def test_is_run_by_who_is_left(): print(os.getpid())
    """,
}


def run(folder: Path, *arguments: str) -> str:
    options = ["-c", "/dev/null", "-p", "tests.side_by_side", "-p", "no:cacheprovider", "-q"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    return done.stdout


def test_every_test_is_run_once_and_a_process_that_dies_fails_the_test_that_it_was_at(
    tmp_path: Path,
) -> None:
    for name, text in FILES.items():
        lines = [line.removeprefix("        ") for line in text.strip("\n").splitlines()]
        (tmp_path / name).write_text("\n".join(lines))
    said = run(tmp_path, "--processes", "3", "-rA", "--basetemp", "temporary")
    assert "2 failed, 7 passed, 1 skipped, 1 error" in said
    assert "FAILED test_bad.py::test_fails" in said and "assert 1 == 2" in said
    assert "ERROR test_bad.py::test_fails_at_its_end" in said
    assert "FAILED test_dead.py::test_ends_its_process" in said
    assert "the process that ran this test has died" in said
    assert "test_comes_after_it" not in said
    assert len(list((tmp_path / "temporary").rglob("file"))) == 5


def test_the_first_failure_ends_it_where_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_fails(): assert False")
    (tmp_path / "test_two.py").write_text("import time\ndef test_waits(): time.sleep(600)")
    said = run(tmp_path, "--processes", "2", "-x")
    assert "1 failed" in said and "stopping after 1 failures" in said
