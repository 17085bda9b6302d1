"""``python -m digenrl``, and the command ``digenrl``."""

import gc
import os
import sys
from pathlib import Path

PACKAGED = Path(__file__).resolve().with_name("_packaged")
"""Folder of ``services`` and ``shared`` in a wheel; in a clone they are next to this package."""

GC_THRESHOLD = 20_000
"""New objects between two garbage collections; Python's default of 700 slows imports by a fifth."""


def leave_working_folder_out() -> None:
    """Take the working folder off the module path: its packages may have the names of ours."""
    ours = Path(__file__).resolve().parents[1]
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != ours:
        del sys.path[0]


def add_packaged() -> None:
    """Put the packages of a wheel on the module path of this process and of its child processes,
    before other distributions."""
    if PACKAGED.is_dir() and str(PACKAGED) not in sys.path:
        sys.path.insert(0, str(PACKAGED))
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGED), *inherited])


def main() -> None:
    add_packaged()
    gc.set_threshold(GC_THRESHOLD)
    from digenrl.commands.cli import main as run

    run()


if __name__ == "__main__":
    leave_working_folder_out()
    main()
