"""`digenrl view` of a run that is over: the link that it prints, and who may read."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.follow.runs import RUN
from tests.view.stored import stored_run


@pytest.mark.parametrize("options", [[], ["--open-api"]], ids=["by its link", "open"])
def test_the_link_that_is_printed_opens_the_page(options: list[str], tmp_path: Path) -> None:
    """Without it nobody reads, unless the page is open to all."""
    stored_run(tmp_path)
    store = {"DIGENRL_STORE_URL": f"file://{tmp_path / 'objects'}"}
    with subprocess.Popen(
        [sys.executable, "-m", "digenrl", "view", RUN, *options],
        stdout=subprocess.PIPE, text=True, cwd=tmp_path, env={**os.environ, **store},
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            link = process.stdout.readline().strip()
            page = httpx.URL(link).join("/")
            assert httpx.get(page).status_code == (200 if options else 401)
            shown = httpx.get(link, follow_redirects=True)
            assert shown.status_code == 200
            assert f"<title>{RUN} - overview" in shown.text
        finally:
            process.terminate()
