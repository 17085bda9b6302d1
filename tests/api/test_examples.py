"""The examples with jq in docs/api.md run on what the commands print."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from tests.api.past_run import past_run
from tests.follow.runs import RUN
from tests.paths import ROOT

EXAMPLES = re.findall(r"^digenrl (.*) \| jq (.*)$", (ROOT / "docs/api.md").read_text(), re.M)


@pytest.mark.skipif(shutil.which("jq") is None, reason="a program of the machine")
def test_examples_with_jq_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past_run(tmp_path)
    monkeypatch.setenv("DIGENRL_STORE_URL", f"file://{tmp_path}")
    monkeypatch.setenv("DIGENRL_RUN", RUN)
    assert len(EXAMPLES) == 5
    said = []
    for command, query in EXAMPLES:
        typed = command.replace("demo", RUN).replace("--step 20", "--step 1")
        printed = CliRunner().invoke(app, shlex.split(typed))
        assert printed.exit_code == 0, printed.output
        found = subprocess.run(
            ["jq", *shlex.split(query)], input=printed.output, capture_output=True, text=True
        )
        assert found.returncode == 0, found.stderr
        said.append(found.stdout.strip())
    assert said[0].startswith("1/") and {"1/0 [1]", "1/2 [1]"} <= {*said[-1].splitlines()}
