"""Manifests and chart: valid, safe, the same thing, and in line with the server's own settings.

Helm's engine runs in a process of its own, as a Go runtime takes over its process's signals.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from seqserve import __version__
from service.server import CLOSING_SECONDS
from service.settings import Settings

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = KUBERNETES / "chart"
MANIFESTS = sorted((KUBERNETES / "manifests").glob("*.yaml"))
RAY_SERVICE = yaml.safe_load((KUBERNETES / "rayservice.yaml").read_text())

HUNG_ENGINE_SECONDS = 5
"""docs/operations.md: how long an engine that hangs is waited for."""

EVERYTHING = """
image: {repository: registry.example/seqserve, tag: "1", variant: gpu}
imagePullSecrets: [{name: pull}]
settings: {grace: 7.5, max_queue_tokens: 4194304, tracing: false, models: "a=/models/a,b=/models/b"}
apiKeysSecret: keys
modelVolume: {emptyDir: {sizeLimit: 5Gi}}
modelInit: {image: fetch, command: [fetch, /models], env: [{name: TOKEN, value: x}]}
preStopSeconds: 3
startupSeconds: 61
autoscaling: {enabled: true, minReplicas: 1}
serviceMonitor: {enabled: true, labels: {release: prometheus}}
service: {type: NodePort, port: 80}
nodeSelector: {disk: ssd}
tolerations: [{operator: Exists}]
affinity: {nodeAffinity: {}}
"""


def resources(text: str) -> dict[str, dict[str, Any]]:
    """Kind -> resource."""
    return {document["kind"]: document for document in yaml.safe_load_all(text) if document}


def rendered(code: str) -> subprocess.CompletedProcess[str]:
    """What Python prints that has the chart's renderer."""
    pytest.importorskip("helm_python", reason="needs Helm's engine: make deploy-tools")
    command = [sys.executable, "-c", f"from pathlib import Path; import render; {code}"]
    return subprocess.run(command, cwd=KUBERNETES, capture_output=True, text=True, timeout=60)


def render(values: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """The chart with some values."""
    (directory / "values.yaml").write_text(values)
    return rendered(f"print(render.render(Path({str(directory / 'values.yaml')!r})))")


def pods() -> dict[str, dict[str, Any]]:
    """Where it stands -> spec of each pod that the checked-in manifests ask for."""
    found = {
        path.name: resources(path.read_text())["Deployment"]["spec"]["template"]["spec"]
        for path in MANIFESTS
    }
    cluster = RAY_SERVICE["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        found[f"rayservice.yaml {group.get('groupName', 'head')}"] = group["template"]["spec"]
    return found


# --- the chart -----------------------------------------------------------------------------------


def test_the_manifests_are_what_the_chart_renders(tmp_path: Path) -> None:
    done = rendered(f"render.main(Path({str(tmp_path)!r}))")
    assert done.returncode == 0, done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {p.name for p in MANIFESTS}
    for path in MANIFESTS:
        assert (tmp_path / path.name).read_text() == path.read_text(), "run make manifests"


def test_all_values_together_make_valid_resources(tmp_path: Path) -> None:
    done = render(EVERYTHING, tmp_path)
    assert done.returncode == 0, done.stderr
    found = resources(done.stdout)
    for resource in found.values():
        if resource["kind"] != "ServiceMonitor":
            validate(resource, "1.30")
    spec = found["Deployment"]["spec"]["template"]["spec"]
    (server,) = spec["containers"]
    variables = {variable["name"]: variable["value"] for variable in server["env"]}
    assert variables["SEQSERVE_MAX_QUEUE_TOKENS"] == "4194304"
    assert variables["SEQSERVE_TRACING"] == "false"
    assert variables["SEQSERVE_GRACE"] == "7.5"
    assert server["image"] == "registry.example/seqserve:1-gpu"
    assert spec["terminationGracePeriodSeconds"] == 3 + 8 + 10
    assert server["startupProbe"]["failureThreshold"] * 5 >= 61
    mounts = {mount["name"]: mount.get("readOnly") for mount in server["volumeMounts"]}
    assert mounts == {"tmp": None, "models": True, "keys": True}
    Settings(**{name.removeprefix("SEQSERVE_").lower(): v for name, v in variables.items()})


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ("replica: 2", "replica"),
        ("settings: {port: 9000}", "/settings/port"),
        ("settings: {api_keys: secret}", "/settings/api_keys"),
        ("settings: {grace: soon}", "/settings/grace"),
        ("modelInit: {image: fetch}", "command"),
    ],
)
def test_values_that_would_not_work_are_refused_by_name(
    values: str, told: str, tmp_path: Path
) -> None:
    done = render(values, tmp_path)
    assert done.returncode == 1
    assert told in done.stderr


def test_every_value_has_a_place_in_the_schema() -> None:
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"]
    for path in CHART.glob("values*.yaml"):
        values = yaml.safe_load(path.read_text())
        assert values.keys() <= schema.keys()


def test_the_version_is_the_server_s() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    for where, pod in pods().items():
        tag = pod["containers"][0]["image"].partition(":")[2]
        assert tag.partition("-")[0] == __version__, where


# --- what is checked in --------------------------------------------------------------------------


def validate(resource: dict[str, Any], version: str) -> None:
    """Raises an error where Kubernetes' own schemas do not know the resource as it is."""
    name = "kubernetes_validate"
    validator = pytest.importorskip(name, reason="needs Kubernetes' schemas: make deploy-tools")
    validator.validate(resource, version, strict=True)


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_manifests_are_valid_from_the_oldest_to_the_newest_version(
    path: Path, version: str
) -> None:
    found = resources(path.read_text())
    assert {"Deployment", "Service", "PodDisruptionBudget"} <= found.keys()
    for kind, resource in found.items():
        if kind != "ServiceMonitor":  # the Prometheus operator's
            validate(resource, version)


def test_the_schemas_refuse_what_is_misspelt() -> None:
    resource = resources(MANIFESTS[0].read_text())["Deployment"]
    resource["spec"]["template"]["spec"]["terminationGracePeriod"] = 45
    with pytest.raises(Exception, match="terminationGracePeriod"):
        validate(resource, "1.30")


@pytest.mark.parametrize("where", [where for where in pods() if "ray" in where])
def test_pods_of_the_ray_cluster_are_valid(where: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pods()[where]}
    validate(pod, "1.37")


@pytest.mark.parametrize("where", pods())
def test_pods_may_do_nothing_but_serve(where: str) -> None:
    pod = pods()[where]
    user = (ROOT / "Dockerfile").read_text().partition("\nUSER ")[2].split()[0]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": int(user),
        "runAsGroup": int(user),
        "fsGroup": int(user),
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"requests", "limits"} <= container["resources"].keys()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_pod_is_given_the_time_that_the_server_takes_to_drain(path: Path) -> None:
    pod = resources(path.read_text())["Deployment"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    variables = {variable["name"]: variable["value"] for variable in server["env"]}
    pause = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = float(variables["SEQSERVE_GRACE"]) + HUNG_ENGINE_SECONDS + CLOSING_SECONDS
    assert pod["terminationGracePeriodSeconds"] >= pause + drain
    for name in variables:
        assert name.removeprefix("SEQSERVE_").lower() in Settings.model_fields
    assert server["livenessProbe"]["httpGet"]["path"] == "/health"
    assert server["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert server["startupProbe"]["httpGet"]["path"] == "/ready"


def test_a_gpu_is_asked_for_where_there_is_one() -> None:
    pod = pods()["gpu.yaml"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_pods_are_counted_by_metrics_that_the_server_has_and_the_adapter_gives() -> None:
    manifest = resources((KUBERNETES / "manifests" / "cpu-autoscaled.yaml").read_text())
    assert "replicas" not in manifest["Deployment"]["spec"]  # the autoscaler's to decide
    scaler = manifest["HorizontalPodAutoscaler"]["spec"]
    wanted = {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]}
    rules = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    given = {rule["seriesQuery"].partition("{")[0] for rule in rules}
    told = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "operations.md").read_text(), re.M)
    assert wanted == given == {"seqserve_queue_length", "seqserve_rows"}
    assert wanted <= set(told)
    rows = scaler["metrics"][1]["pods"]["target"]["averageValue"]
    assert int(rows) == 3 * Settings().max_rows / 4


def test_the_ray_application_is_one() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="needs the extra ray")
    config = yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])
    (application,) = schema.ServeDeploySchema(**config).applications
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    for pod in (pod for where, pod in pods().items() if "ray" in where):
        (variable,) = pod["containers"][0]["env"]
        module, _, name = variable["value"].partition(":")
        assert callable(getattr(importlib.import_module(module), name))
    ray = re.search(r"^ray==(\S+)", (ROOT / "deploy" / "locks" / "ray.txt").read_text(), re.M)
    assert ray
    assert RAY_SERVICE["spec"]["rayClusterConfig"]["rayVersion"] == ray[1]
