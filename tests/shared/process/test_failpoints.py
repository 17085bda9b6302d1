"""Points at which a process is killed, in processes of their own."""

import os
import signal
import subprocess
import sys

import pytest

from shared.process.failpoints import VARIABLE, parse_failpoint

PASSES = "from shared.process.failpoints import reach; [reach(p) for p in ('a', 'b', 'a', 'b')]"


@pytest.mark.parametrize(
    ("wanted", "ends"),
    [("b:2", -signal.SIGKILL), ("b", -signal.SIGKILL), ("b:3", 0), ("c", 0), ("", 0)],
)
def test_a_process_is_killed_when_it_comes_to_its_point_often_enough(
    wanted: str, ends: int
) -> None:
    environment = {**os.environ, VARIABLE: wanted}
    done = subprocess.run([sys.executable, "-c", PASSES], env=environment, check=False)
    assert done.returncode == ends


@pytest.mark.parametrize("text", ["a:", "a:x", "a:0", ":1"])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=VARIABLE):
        parse_failpoint(text)
