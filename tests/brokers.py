"""The brokers that fixtures start, for tests that start and kill them by themselves."""

import subprocess
from collections.abc import Callable

from digenrl.local.brokers.embedded import Brokers, Program

PASSWORD = "a-password-of-the-tests"
StartProgram = Callable[[Program], "subprocess.Popen[bytes]"]


def program(brokers: Brokers, name: str) -> Program:
    return next(program for program in brokers.programs if program.name == name)
