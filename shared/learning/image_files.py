"""Source images that prompts name: files below the folder of the prompts, hashed once."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from shared.errors import ContractError, UserError
from shared.learning.pictures import check_picture
from shared.limits import MAX_PICTURE_BYTES
from shared.messages.contracts import SourceImage

IMAGE = "image"
"""Key or column of prompts that names the image."""


def source_image(path: Path, where: str, image: Any) -> tuple[SourceImage | None, Path | None]:
    """Return what a row's image is, and where; ``where`` is the row, for a UserError."""
    if image is None:
        return None, None
    if not isinstance(image, str) or "\0" in image or not _is_below(image):
        raise UserError(
            f"{where}: {IMAGE}: {repr(image)[:80]} is no path below the folder of the prompts; put "
            "the image there, and name it relative to the file. data.dataset.folder takes images "
            "themselves"
        )
    file = (path if path.is_dir() else path.parent) / image
    try:
        status = file.stat()
        return _source_image(file, status.st_mtime_ns, status.st_size), file
    except OSError as error:
        raise UserError(f"{where}: {IMAGE}: cannot read {file}: {error.strerror}") from error
    except ContractError as error:
        raise UserError(f"{where}: {IMAGE}: {file} {error}") from error


def _is_below(image: str) -> bool:
    named = Path(image)
    return bool(named.parts) and not named.is_absolute() and ".." not in named.parts


@lru_cache(maxsize=1 << 17)
def _source_image(file: Path, _changed_ns: int, size: int) -> SourceImage:
    """Hash an image's file, once while it does not change; raises ContractError if it is no
    image."""
    if size > MAX_PICTURE_BYTES:
        raise ContractError(
            f"has {size >> 20} MiB; at most {MAX_PICTURE_BYTES >> 20}: make it smaller"
        )
    data = file.read_bytes()
    check_picture(data)
    return SourceImage(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
