"""Requests to an S3 server, signed by Signature Version 4 of AWS: what our store never asks."""

import hashlib
import hmac
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

import httpx

REGION, SERVICE = "us-east-1", "s3"


async def request(
    endpoint: str, login: tuple[str, str], method: str, path: str, *,
    query: dict[str, str] | None = None, body: bytes = b"", headers: dict[str, str] | None = None,
) -> httpx.Response:  # fmt: skip
    """Send one request; ``login``: access key and secret key."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    scope = f"{now[:8]}/{REGION}/{SERVICE}/aws4_request"
    digest = hashlib.sha256(body).hexdigest()
    signed = {
        **(headers or {}), "host": urlsplit(endpoint).netloc, "x-amz-content-sha256": digest,
        "x-amz-date": now,
    }  # fmt: skip
    names = ";".join(sorted(signed))
    asked = "&".join(
        f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in sorted((query or {}).items())
    )
    lines = [f"{name}:{signed[name]}" for name in sorted(signed)]
    canonical = "\n".join([method, quote(path), asked, *lines, "", names, digest])
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashed])
    key = f"AWS4{login[1]}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={login[0]}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    url = f"{endpoint}{path}" + (f"?{asked}" if asked else "")
    async with httpx.AsyncClient(verify=False) as client:
        return await client.request(method, url, content=body, headers=signed)
