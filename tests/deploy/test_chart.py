"""The chart of Kubernetes: what it refuses, what it renders, and who reaches whom."""

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from digenrl.local.brokers.deployment import BrokerAddresses, kubernetes_secrets, make_deployment
from digenrl.local.brokers.embedded import DURABLE
from digenrl.local.brokers.seaweedfs import BUCKET
from digenrl.local.limits import CHILD_STOP_S
from shared.limits import EXIT_TIMEOUT_S
from shared.messages.rights import ROLES, role_permissions
from shared.recipe.recipe import load_recipe
from shared.release import RELEASE
from shared.run.rights import REDIS
from tests.deploy.chart import (
    CHART,
    EXAMPLES,
    PLAIN,
    Document,
    Network,
    Pod,
    documents,
    pods_of,
    render,
    values_of,
)
from tests.paths import ROOT

helm_python = pytest.importorskip("helm_python", reason="helm-python-sdk is missing")
pytestmark = pytest.mark.deploy
OLDEST, NEWEST = "1.31", "1.37"
every_set = pytest.mark.parametrize("name", EXAMPLES)


@pytest.fixture(scope="module")
def validator() -> Iterator[Any]:
    """kubernetes-validate, which reads each file of schemas once."""
    found = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is missing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found.utils, "schema_contents", cache(found.utils.schema_contents))
        yield found


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Document]]:
    return {name: documents(render(values_of(name))) for name in EXAMPLES}


def pools(*given: dict[str, Any]) -> dict[str, Any]:
    named = [{"name": f"pool-{number}", **each} for number, each in enumerate(given)]
    return {"pools": [*named, {"name": "t", "kind": "trainer"}, {"name": "r", "kind": "reward"}]}


@every_set
def test_the_chart_passes_lint(name: str) -> None:
    report = helm_python.lint(CHART, values_of(name), strict=True)
    assert [each for each in report["messages"] if each["severity"] > 1] == []
    assert report["errors"] == []


@every_set
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid_for_the_oldest_and_the_newest_kubernetes(
    name: str, version: str, rendered: dict[str, list[Document]], validator: Any
) -> None:
    for document in rendered[name]:
        assert validator.validate(document, version, strict=True) == version


def test_a_key_that_kubernetes_does_not_know_is_found(
    rendered: dict[str, list[Document]], validator: Any
) -> None:
    document = copy.deepcopy(next(each for each in rendered["demo"] if each["kind"] == "Service"))
    document["spec"]["prots"] = []
    with pytest.raises(validator.ValidationError, match="prots"):
        validator.validate(document, NEWEST, strict=True)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"pols": []}, "additional properties 'pols' not allowed"),
        ({"pools": []}, "at '/pools': minItems: got 0, want 1"),
        (pools({"kind": "judge"}), "at '/pools/0/kind': value must be one of 'rollout', 'trainer'"),
        (pools({}), "at '/pools/0': missing property 'kind'"),
        (pools({"kind": "rollout", "gpu": 1}), "at '/pools/0': additional properties 'gpu' not"),
        (pools({"kind": "rollout", "gpus": "8"}), "at '/pools/0/gpus': got string, want integer"),
        (pools({"kind": "rollout", "replicas": -1}), "at '/pools/0/replicas': minimum: got -1"),
        (pools({"kind": "rollout", "name": "A 100"}), "at '/pools/0/name': 'A 100' does not match"),
        (pools({"kind": "rollout", "name": "t"}), "pools: t is the name of two pools; rename one"),
        (pools({"kind": "rollout", "name": "nats"}), "pools: nats is the name of another part"),
        (
            pools({"kind": "rollout", "name": "rtx-4090-cellar1"}),
            "have more than 22 letters together",
        ),
        ({"pools": [{"name": "t", "kind": "trainer"}]}, "pools: none has the kind reward"),
        ({"pools": [{"name": "r", "kind": "reward"}]}, "pools: none has the kind trainer"),
        ({"run": "my run"}, "at '/run': 'my run' does not match pattern"),
        ({"recipe": "digits"}, "at '/recipe': 'digits' does not match pattern"),
        ({"recipe": "/recipe/mine.toml"}, "recipe: /recipe/mine.toml is not in recipeFiles"),
        ({"existingSecret": ""}, "at '/existingSecret': '' does not match pattern"),
        ({"images": {"host": "digenrl-host"}}, "at '/images/host': 'digenrl-host' does not match"),
        (
            {"images": {"registry": "host:5000"}},
            "at '/images/registry': 'host:5000' does not match",
        ),
        ({"brokers": {"s3": {"size": "50GB"}}}, "at '/brokers/s3/size': '50GB' does not match"),
        ({"brokers": {"deploy": False}}, "brokers.nats.peers: empty, and brokers.deploy is false"),
        ({"models": {"accessModes": ["Shared"]}}, "at '/models/accessModes/0': value must be one"),
        (
            {"models": {"hubTokenSecret": "A B"}},
            "at '/models/hubTokenSecret': 'A B' does not match",
        ),
        ({"env": {"lower": "x"}}, "at '/env': additional properties 'lower' not allowed"),
        ({"recipeFiles": {"../x": ""}}, "at '/recipeFiles': additional properties '../x' not"),
        ({"recipe": "mine.yaml"}, "at '/recipe': 'mine.yaml' does not match pattern"),
        ({"hosts": ["http://page"]}, "at '/hosts/0': 'http://page' does not match pattern"),
        ({"clients": [{"cidr": "::/0"}]}, "at '/clients/0': additional properties 'cidr' not"),
        (
            pools({"kind": "rollout", "tolerations": [{"operator": "Is"}]}),
            "at '/pools/0/tolerations/0/operator': value must be one of 'Exists', 'Equal'",
        ),
        (
            pools({"kind": "rollout", "nodeSelector": {"a b": "c"}}),
            "at '/pools/0/nodeSelector': additional properties 'a b' not allowed",
        ),
        (
            pools({"kind": "rollout", "resources": {"limits": {"cpu": "two"}}}),
            "at '/pools/0/resources/limits/cpu': 'two' does not match pattern",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(helm_python.HelmError) as refused:
        render(values)
    head = ("values don't meet the specifications", "digenrl:")
    [said] = [each for each in str(refused.value).splitlines() if not each.startswith(head)]
    assert line in said


@pytest.mark.parametrize("name", PLAIN)
def test_the_committed_yaml_is_what_the_chart_renders(name: str) -> None:
    assert PLAIN[name].read_text() == render(values_of(name)), (
        "`python -m tests.deploy.chart` writes it"
    )


def test_values_for_the_brokers_own_charts_have_their_users_and_keep_what_is_acknowledged(
    tmp_path: Path,
) -> None:
    make_deployment(tmp_path, BrokerAddresses(nats="n:1", redis="r:2", s3="http://s:3"))
    listed = kubernetes_secrets(tmp_path, "digenrl")["items"]
    shared = {each["metadata"]["name"]: each["data"] for each in listed}
    given = {
        name: yaml.safe_load((CHART.parent / f"brokers/{name}.yaml").read_text())
        for name in ("nats", "valkey", "seaweedfs")
    }
    config = given["nats"]["config"]
    assert config["merge"]["00$include"] == "../digenrl/users.conf"
    assert config["jetstream"]["merge"] == {"sync_interval": "always"}
    assert "users.conf" in shared["digenrl-nats"]
    assert given["valkey"]["valkeyConfig"] == f"aclfile /etc/digenrl/users.acl\n{DURABLE}"
    assert "users.acl" in shared["digenrl-redis"]
    assert given["seaweedfs"]["filer"]["s3"]["createBuckets"] == [{"name": BUCKET}]


def test_files_in_the_commands_of_the_page_exist() -> None:
    page = (ROOT / "docs/deploy/kubernetes.md").read_text()
    named = set(re.findall(r"deploy/(?:charts|kubernetes)/[\w./-]+\w", page))
    assert len(named) > 5 and [path for path in named if not (ROOT / path).exists()] == []


def test_the_chart_is_of_this_release() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == RELEASE


@every_set
def test_the_recipe_of_a_value_set_is_one(name: str, tmp_path: Path) -> None:
    values = values_of(name)
    for file, text in values.get("recipeFiles", {}).items():
        (tmp_path / file).write_text(text.replace("/app/recipes", f"{ROOT}/recipes"))
    given = values.get("recipe", "recipes/digits.toml")
    path = tmp_path / Path(given).name if given.startswith("/recipe/") else ROOT / given
    recipe = load_recipe(path, {"run.name": values.get("run", "digits")})
    kinds = {pool["kind"] for pool in values.get("pools", ())}
    assert (recipe.encoder.workers > 0) == ("encoder" in kinds)
    if values.get("models", {}).get("fetch"):
        assert recipe.model.id is not None


def matrix(folder: Path) -> set[tuple[str, str]]:
    """Which role has rights at which server, as the brokers' own configuration says."""
    make_deployment(folder, BrokerAddresses(nats="n:1", redis="r:2", s3="http://s:3"), ["digits"])
    identities = json.loads((folder / "brokers/s3/.seaweedfs/s3.json").read_text())["identities"]
    reading = {each["name"] for each in identities if any("Read" in a for a in each["actions"])}
    return {
        *((role, "nats") for role in ROLES if role_permissions(role).publish),
        *((role, "redis") for role in ROLES if "~" in REDIS[role]),
        *((role, "s3") for role in ROLES if role in reading),
        ("client", "scheduler"),  # the page
        ("scheduler", "scheduler"),  # a standby passes requests on
    }


@every_set
def test_pods_reach_where_their_role_has_rights_and_nothing_else(
    name: str, rendered: dict[str, list[Document]], tmp_path: Path
) -> None:
    texts, expected = rendered[name], matrix(tmp_path)
    pods, network = list(pods_of(texts)), Network.from_documents(texts)
    assert {pod.role for pod in pods} >= {"scheduler", "client", "trainer", "reward"}
    for source in pods:
        for target in pods:
            is_allowed = (source.role, target.component) in expected
            found = {port for port in [*target.ports, 22] if network.lets(source, target, port)}
            assert found == (set(target.ports) if is_allowed else set()), (source, target)


@pytest.mark.parametrize("name", ["four-kinds", "four-kinds-fluid"])
def test_roles_without_rights_do_not_reach_brokers_elsewhere_either(
    name: str, rendered: dict[str, list[Document]], tmp_path: Path
) -> None:
    values, expected = values_of(name), matrix(tmp_path)
    policies = {
        each["metadata"]["name"]: each["spec"]
        for each in rendered[name]
        if each["kind"] == "NetworkPolicy"
    }
    for server in ("nats", "redis", "s3"):
        policy = policies[f"digenrl-to-{server}"]
        [roles] = [each["values"] for each in policy["podSelector"]["matchExpressions"]]
        assert {(role, server) for role in roles} == {
            pair for pair in expected if pair[1] == server
        }
        assert policy["egress"][0]["to"] == values["brokers"][server]["peers"]


@every_set
def test_a_pod_is_restricted_and_has_the_secrets_of_its_role_alone(
    name: str, rendered: dict[str, list[Document]], tmp_path: Path
) -> None:
    prefix = values_of(name).get("existingSecret", "digenrl")
    make_deployment(tmp_path, BrokerAddresses(nats="n:1", redis="r:2", s3="http://s:3"))
    made = {
        each["metadata"]["name"]: each for each in kubernetes_secrets(tmp_path, prefix)["items"]
    }
    for pod in pods_of(rendered[name]):
        _check_restricted(pod)
        secrets = [each["secret"] for each in pod.spec["volumes"] if "secret" in each]
        names = {each["secretName"] for each in secrets}
        if pod.component == "models":
            assert names <= {"hub"}
            continue
        [secret] = secrets
        own = "view" if pod.component == "view" else pod.role or pod.component
        assert secret["secretName"] == f"{prefix}-{own}"
        wanted = {item["key"] for item in secret.get("items", ())}
        assert wanted <= made[secret["secretName"]]["data"].keys()


def _check_restricted(pod: Pod) -> None:
    """Kubernetes' Pod Security Standard of this name, and a read-only root."""
    spec = pod.spec
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["automountServiceAccountToken"] and not spec["enableServiceLinks"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    kinds = {key for volume in spec["volumes"] for key in volume} - {"name"}
    assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@every_set
def test_workers_are_started_by_digenrl_host_and_have_time_to_load_and_to_drain(
    name: str, rendered: dict[str, list[Document]]
) -> None:
    hosts = [
        pod for pod in pods_of(rendered[name]) if pod.role not in (None, "scheduler", "client")
    ]
    for pod in hosts:
        assert pod.container["args"] == ["host", f"--roles={pod.role}", "--logs=/tmp/logs"]
        assert "command" not in pod.container
        assert pod.spec["terminationGracePeriodSeconds"] > CHILD_STOP_S + EXIT_TIMEOUT_S
        probe = pod.container["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= 60e9 / 12e6  # 12 MB/s


@every_set
def test_each_pool_has_its_kind_of_workload_its_gpus_and_a_budget_of_disruptions(
    name: str, rendered: dict[str, list[Document]]
) -> None:
    found = {
        (each["kind"], each["metadata"]["name"]): each.get("spec", {}) for each in rendered[name]
    }
    values = values_of(name)
    for pool in values.get("pools", ()):
        kept = pool["kind"] in ("rollout", "trainer")
        spec = found[("StatefulSet" if kept else "Deployment", f"digenrl-{pool['name']}")]
        container = spec["template"]["spec"]["containers"][0]
        limits = container["resources"].get("limits", {})
        assert limits.get("nvidia.com/gpu", 0) == pool.get("gpus", 0)
        assert spec["template"]["spec"].get("nodeSelector") == pool.get("nodeSelector")
        assert spec["template"]["spec"].get("tolerations") == pool.get("tolerations")
        budget = found[("PodDisruptionBudget", f"digenrl-{pool['name']}")]
        assert budget["selector"] == spec["selector"] and budget["maxUnavailable"] == 1
        jobs = [key for key in found if key[0] == "Job" and f"-models-{pool['name']}-" in key[1]]
        assert len(jobs) == bool(values.get("models", {}).get("fetch"))
    assert found["Deployment", "digenrl-scheduler"]["replicas"] == 2
    assert found["PodDisruptionBudget", "digenrl-scheduler"]["minAvailable"] == 1
