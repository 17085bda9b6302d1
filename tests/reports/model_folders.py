"""Model folders as people have them: small random models, each of which a test changes."""

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests import tiny_models


@functools.cache
def _made(family: str) -> Path:
    return tiny_models.save(family, Path(tempfile.mkdtemp(prefix="tiny-")) / family)


def copy_of(family: str, folder: Path) -> Path:
    """A model of the family, to be changed."""
    shutil.copytree(_made(family), folder)
    return folder


def change(file: Path, **values: Any) -> None:
    """Sets keys of a JSON file; one whose value is ``...`` is removed."""
    plain = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: each for key, each in plain.items() if each is not ...}))
