"""Names that become part of subjects, keys and paths. One pattern, checked everywhere."""

import re

from shared.errors import UserError

_TOKEN = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"

TOKEN_PATTERN = rf"^{_TOKEN}$"
"""For pydantic, whose regular expressions take ``$`` as the very end, unlike Python's."""

TOKEN_WORDS = "1 to 64 letters, digits, '-' and '_', starting with a letter or digit"


def token(value: str, *, field: str) -> str:
    """``value`` itself, if it may be part of a subject, key or path.

    Raises:
        UserError: naming ``field``, if it may not.
    """
    if re.fullmatch(_TOKEN, value) is None:
        raise UserError(f"{field}: {value!r} is not a name; use {TOKEN_WORDS}")
    return value
