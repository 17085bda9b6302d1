"""``python -m bench``, from a clone: errors that a user can mend are one line and exit code 2."""

from bench.cli import bench
from digenrl.commands.cli import run_command

if __name__ == "__main__":
    run_command(bench)
