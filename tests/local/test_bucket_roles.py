"""What each role may ask of the bucket itself, in a real object store: to list and to read it."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from digenrl.local.brokers.embedded import BUCKET, Brokers, plan_brokers
from digenrl.local.secrets.keys import Keys, load_keys
from shared.messages.rights import ROLES
from tests.brokers import StartProgram, program
from tests.local.signed import request

KEPT = f"/{BUCKET}/digits/commits/00000001.json"
POLICY = (
    b'{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":"s3:*",'
    b'"Resource":"arn:aws:s3:::%s/*"}]}' % BUCKET.encode()
)
ENABLED = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
CORS = (
    b"<CORSConfiguration><CORSRule><AllowedOrigin>*</AllowedOrigin><AllowedMethod>PUT"
    b"</AllowedMethod></CORSRule></CORSConfiguration>"
)
EXPIRED = (
    b"<LifecycleConfiguration><Rule><ID>x</ID><Status>Enabled</Status><Filter><Prefix></Prefix>"
    b"</Filter><Expiration><Days>1</Days></Expiration></Rule></LifecycleConfiguration>"
)
TAGS = b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"
OPEN = {"x-amz-acl": "public-read-write"}
REMOVED = b"<Delete><Object><Key>digits/commits/00000001.json</Key></Object></Delete>"


class Operation(NamedTuple):
    method: str
    path: str
    query: Mapping[str, str] = MappingProxyType({})
    body: bytes = b""
    headers: Mapping[str, str] = MappingProxyType({})


ALLOWED = {
    "head the bucket": Operation("HEAD", f"/{BUCKET}"),
    "list the bucket": Operation("GET", f"/{BUCKET}", {"list-type": "2"}),
    "read an object": Operation("GET", KEPT),
}
DENIED = {
    "make a bucket": Operation("PUT", "/another"),
    "delete the bucket": Operation("DELETE", f"/{BUCKET}"),
    "set a policy": Operation("PUT", f"/{BUCKET}", {"policy": ""}, POLICY),
    "delete the policy": Operation("DELETE", f"/{BUCKET}", {"policy": ""}),
    "open it to all": Operation("PUT", f"/{BUCKET}", {"acl": ""}, headers=OPEN),
    "set versions": Operation("PUT", f"/{BUCKET}", {"versioning": ""}, ENABLED),
    "let origins in": Operation("PUT", f"/{BUCKET}", {"cors": ""}, CORS),
    "forbid origins": Operation("DELETE", f"/{BUCKET}", {"cors": ""}),
    "let objects expire": Operation("PUT", f"/{BUCKET}", {"lifecycle": ""}, EXPIRED),
    "let none expire": Operation("DELETE", f"/{BUCKET}", {"lifecycle": ""}),
    "tag the bucket": Operation("PUT", f"/{BUCKET}", {"tagging": ""}, TAGS),
    "delete many": Operation("POST", f"/{BUCKET}", {"delete": ""}, REMOVED),
    "copy over": Operation(
        "PUT", f"/{BUCKET}/elsewhere/x", headers={"x-amz-copy-source": KEPT}
    ),
    "begin in parts": Operation("POST", f"/{BUCKET}/elsewhere/x", {"uploads": ""}),
    "tag an object": Operation("PUT", f"/{BUCKET}/digits/elsewhere", {"tagging": ""}, TAGS),
    "open an object": Operation("PUT", f"/{BUCKET}/digits/elsewhere", {"acl": ""}, headers=OPEN),
}  # fmt: skip


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return load_keys(tmp_path / "brokers")


@pytest.fixture
def planned(tmp_path: Path, keys: Keys) -> Brokers:
    return plan_brokers(tmp_path / "brokers", keys, runs=["digits"])


@pytest.fixture
def objects(planned: Brokers, start: StartProgram) -> "subprocess.Popen[bytes]":
    return start(program(planned, "objects"))


@pytest.mark.slow
async def test_no_role_may_change_the_bucket_or_what_is_not_its_own(
    planned: Brokers, keys: Keys, objects: "subprocess.Popen[bytes]"
) -> None:
    endpoint = planned.environment["DIGENRL_S3_ENDPOINT"]
    owner = planned.owner["DIGENRL_S3_ACCESS_KEY"], planned.owner["DIGENRL_S3_SECRET_KEY"]
    made = await request(endpoint, owner, "PUT", KEPT, body=b"the truth")
    assert made.status_code == 200, made.text
    wrong = []
    for role in ROLES:
        login = role, keys.secret(role)
        for table, is_allowed in ((ALLOWED, True), (DENIED, False)):
            for name, operation in table.items():
                if (role, name) == ("trainer", "delete many"):
                    continue  # commits are its own
                method, path, query, body, headers = operation
                answer = await request(
                    endpoint,
                    login,
                    method,
                    path,
                    query=dict(query),
                    body=body,
                    headers=dict(headers),
                )
                refused = answer.status_code in (403, 405) or b"AccessDenied" in answer.content
                if refused == is_allowed:
                    wrong.append((role, name, answer.status_code, answer.text[:200]))
    assert wrong == []
    kept = await request(endpoint, owner, "GET", KEPT)
    assert kept.content == b"the truth"
