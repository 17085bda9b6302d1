"""Packages that only some uses need: extras of pyproject.toml, and how one is installed."""


def how_to_install(extra: str) -> str:
    """What a message says to do where an extra is missing.

    Commands are those of a clone: the package itself is on no index, so that its extras cannot be
    asked for by name.
    """
    return (
        f'needs the extra "{extra}"; in the clone, run make install, '
        f'or .venv/bin/uv pip install -c constraints.txt -e ".[{extra}]"'
    )
