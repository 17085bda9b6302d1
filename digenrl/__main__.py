"""``python -m digenrl``."""

import sys
from pathlib import Path


def leave_working_folder_out() -> None:
    """Python looks for modules in the folder that it is started in first, and that one may hold
    packages which are named as ours are."""
    ours = Path(__file__).resolve().parents[1]
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != ours:
        del sys.path[0]


if __name__ == "__main__":
    leave_working_folder_out()
    from digenrl.cli import main

    main()
