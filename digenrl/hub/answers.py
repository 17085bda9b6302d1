"""The hub's responses, as errors with a remedy."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Unavailable, UserError, how_to_install
from shared.models.hub import ID_PATTERN, REVISION_PATTERN
from shared.proxies import through

ENDPOINT = "https://huggingface.co"


def endpoint() -> str:
    """Return the address of the hub, or of the mirror that HF_ENDPOINT names."""
    return os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")


def check_installed() -> None:
    """Raises UserError, with the remedy, if the library that speaks with the hub is not there."""
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise UserError(f"the Hugging Face hub {how_to_install('hub')} ({error})") from error


def check_names(name: str, revision: str | None, key: str) -> None:
    """Raises UserError unless the hub may have a repository and a revision of these names."""
    if not re.fullmatch(ID_PATTERN, name):
        raise UserError(
            f"{key}: {name!r} is no name on the hub; give the owner and the name, org/name"
        )
    if revision is not None and not re.fullmatch(REVISION_PATTERN, revision):
        raise UserError(
            f"{key.rpartition('.')[0]}.revision: {revision!r} is no branch, tag or commit; leave "
            "it out for main"
        )


@contextmanager
def explained(
    model: str, revision: str | None = None, *, key: str = "model.id", folder: str = ""
) -> Iterator[None]:
    """Raise what the hub refuses as UserError, and what does not answer as Unavailable; one line
    each, which names ``key``, the model and the remedy. ``folder``: what stands before the name in
    the page's address."""
    from huggingface_hub import errors

    page = f"{endpoint()}/{folder}{model}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"{key}: {model} is gated: accept its terms at {page} in a browser, and set "
            "HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{key}: there is no {model} at {endpoint()} for this token; correct the name, or "
            "set HF_TOKEN if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{key.rpartition('.')[0]}.revision: {model} has no revision {revision!r}; see "
            f"{page}/tree/main"
        ) from error
    except errors.HfHubHTTPError as error:
        raise _error_from_status(error, model) from error
    except (OSError, RuntimeError, errors.FileMetadataError) as error:
        raise _error_from_connection(error, model) from error
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):
            raise
        raise Unavailable(_broken(model, error)) from error


def _error_from_status(error: Exception, model: str) -> Exception:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return UserError(
            f"{endpoint()} refuses the token for {model} (status {status}); set HF_TOKEN to one of "
            "an account that may do this"
        )
    return Unavailable(_broken(model, error))


def _error_from_connection(error: Exception, model: str) -> Exception:
    from huggingface_hub.errors import OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return UserError(
            f"HF_HUB_OFFLINE: is set, so that {model} cannot be fetched; unset it for this command"
        )
    return Unavailable(_broken(model, error))


def _broken(model: str, error: Exception) -> str:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"{endpoint()} did not give all of {model}{through(endpoint())}: {reason[0]}; run the "
        "command again, it goes on where it ended"
    )
