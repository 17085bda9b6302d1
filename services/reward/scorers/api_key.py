"""Reads the key that an endpoint asks for; it is in no recipe, log or error."""

import os

from shared.errors import UserError
from shared.recipe.rewards import Judge, Remote


def read_key(settings: Judge | Remote) -> str | None:
    """Returns the key, or None if the recipe names no place of one.

    Raises:
        UserError: if that place has no key, or something that cannot be one.
    """
    table = "judge" if isinstance(settings, Judge) else "remote"
    if settings.key_env is not None:
        field, found = f"{table}.key_env", os.environ.get(settings.key_env)
        if found is None:
            raise UserError(
                f"{field}: {settings.key_env} is not set here; set it, or leave key_env out"
            )
    elif settings.key_file is not None:
        field = f"{table}.key_file"
        try:
            found = settings.key_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text"
            raise UserError(f"{field}: cannot read {settings.key_file}: {reason}") from None
    else:
        return None
    key = found.strip()
    if not key or not all("!" <= character <= "~" for character in key):
        raise UserError(f"{field}: this is no key; a key is one word of ASCII characters")
    return key
