"""``python -m digenrl``."""

import sys
from pathlib import Path


def leave_working_folder_out() -> None:
    """Take the working folder off the module path: its packages may have the names of ours."""
    ours = Path(__file__).resolve().parents[1]
    if not sys.flags.safe_path and Path(sys.path[0]).resolve() != ours:
        del sys.path[0]


if __name__ == "__main__":
    leave_working_folder_out()
    from digenrl.cli import main

    main()
