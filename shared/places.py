"""Where something is, as a log may say it: addresses without the secrets in them."""

from urllib.parse import urlsplit


def public(url: str) -> str:
    """The address alone: no user, no password, no query.

    >>> public("nats://user:secret@nats:4222")
    'nats://nats:4222'
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"
