"""Reads the key that an endpoint asks for; it is in no recipe, log or error."""

import os

from shared.errors import UserError
from shared.recipe.rewards import Judge, Remote


def read_key(told: Judge | Remote) -> str | None:
    """Returns the key, or None if the recipe names no place of one.

    Raises:
        UserError: if that place has no key, or something that cannot be one.
    """
    table = "judge" if isinstance(told, Judge) else "remote"
    if told.key_env is not None:
        field, found = f"{table}.key_env", os.environ.get(told.key_env)
        if found is None:
            raise UserError(
                f"{field}: {told.key_env} is not set here; set it, or leave key_env out"
            )
    elif told.key_file is not None:
        field = f"{table}.key_file"
        try:
            found = told.key_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text"
            raise UserError(f"{field}: cannot read {told.key_file}: {reason}") from None
    else:
        return None
    key = found.strip()
    if not key or not all("!" <= character <= "~" for character in key):
        raise UserError(f"{field}: what is there is no key; it is one word of ASCII characters")
    return key
