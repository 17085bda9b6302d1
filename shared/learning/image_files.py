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
    """Return the image of a row and its path; error messages begin with ``where``."""
    if image is None:
        return None, None
    if not isinstance(image, str) or "\0" in image or not _is_below(image):
        raise UserError(
            f"{where}: {IMAGE}: {repr(image)[:80]} is no path below the folder of the prompts; put "
            "the image there, and name it relative to the file. data.dataset.folder also reads "
            "images that are stored in rows"
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
    path = Path(image)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


@lru_cache(maxsize=1 << 17)
def _source_image(file: Path, _changed_ns: int, size: int) -> SourceImage:
    """Hash an image file; unchanged files are hashed once.

    Raises:
        ContractError: if the file is not an image.
    """
    if size > MAX_PICTURE_BYTES:
        raise ContractError(
            f"has {size >> 20} MiB; at most {MAX_PICTURE_BYTES >> 20}: make it smaller"
        )
    data = file.read_bytes()
    check_picture(data)
    return SourceImage(sha256=hashlib.sha256(data).hexdigest(), size=len(data))
