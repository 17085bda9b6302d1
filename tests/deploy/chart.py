"""The chart of Kubernetes, rendered without a cluster. As a program it writes the plain YAML of two
value sets: `python -m tests.deploy.chart`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from tests.paths import ROOT

CHART = ROOT / "deploy/charts/digenrl"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
PLAIN = {name: ROOT / f"deploy/kubernetes/{name}.yaml" for name in ("demo", "four-kinds")}
"""Committed renders."""

Document = dict[str, Any]


def values_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(EXAMPLES[name].read_text())
    return values


def render(values: Mapping[str, Any], release: str = "digenrl") -> str:
    """The text of `helm template`. Raises HelmError if the chart refuses the values."""
    from helm_python.chart import Chart

    with Chart.load(CHART) as chart:
        files = chart.render(dict(values), name=release, namespace="digenrl")
    texts = {path: text.strip() for path, text in sorted(files.items())}
    return "".join(f"---\n# Source: {path}\n{text}\n" for path, text in texts.items() if text)


def documents(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document]


@dataclass(frozen=True)
class Pod:
    """A pod that the documents lead to."""

    name: str
    labels: Mapping[str, str]
    spec: Document

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def role(self) -> str | None:
        return self.labels.get("digenrl/role")

    @property
    def container(self) -> Document:
        [container] = self.spec["containers"]
        return dict(container)

    @property
    def ports(self) -> list[int]:
        return [port["containerPort"] for port in self.container.get("ports", ())]


def pods_of(texts: list[Document]) -> Iterator[Pod]:
    for document in texts:
        spec = document.get("spec", {})
        if "template" in spec:
            template = spec["template"]
            claims = [
                {"name": claim["metadata"]["name"], "persistentVolumeClaim": {}}
                for claim in spec.get("volumeClaimTemplates", ())
            ]
            inner = dict(template["spec"])
            inner["volumes"] = [*inner["volumes"], *claims]
            for number in range(spec.get("replicas", 1)):
                name = f"{document['metadata']['name']}-{number}"
                yield Pod(name, template["metadata"]["labels"], inner)


@dataclass(frozen=True)
class Network:
    """What NetworkPolicies let pods of one namespace do."""

    policies: list[Document]

    @classmethod
    def from_documents(cls, texts: list[Document]) -> "Network":
        return cls([each["spec"] for each in texts if each["kind"] == "NetworkPolicy"])

    def lets(self, source: Pod, target: Pod, port: int) -> bool:
        return self._one_way("Egress", "to", source, target, port) and self._one_way(
            "Ingress", "from", target, source, port
        )

    def _one_way(self, kind: str, side: str, subject: Pod, peer: Pod, port: int) -> bool:
        selecting = [
            each
            for each in self.policies
            if kind in each["policyTypes"] and selects(each["podSelector"], subject.labels)
        ]
        if not selecting:
            return True
        rules = [rule for each in selecting for rule in each.get(kind.lower(), ())]
        return any(
            any(_is_peer(each, peer) for each in rule[side])
            and any(each["port"] == port for each in rule["ports"])
            for rule in rules
        )


def _is_peer(peer: Document, pod: Pod) -> bool:
    """Whether a peer of a rule is a pod of the same namespace."""
    return set(peer) == {"podSelector"} and selects(peer["podSelector"], pod.labels)


def selects(selector: Document, labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items()
    expressions = selector.get("matchExpressions", ())
    assert all(each["operator"] == "In" for each in expressions)
    return wanted <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


if __name__ == "__main__":
    for name, path in PLAIN.items():
        path.write_text(render(values_of(name)))
