"""Dashboard, alerts and compose profile go by metrics, labels and files that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from .test_metrics import documented_metrics, scrape

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "seqserve.json").read_text())
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
ALERT_EXPRESSIONS = [rule["expr"] for rule in RULES]
METRIC = re.compile(r"\b((?:seqserve|process)_\w+)(?:\{([^}]*)\})?")
FROM_PROMETHEUS = {"instance", "job", "le"}


def metrics_in(expression: str) -> list[tuple[str, set[str]]]:
    """Each metric of an expression, without its suffix, and the labels that it is picked by."""
    found = []
    for name, selectors in METRIC.findall(expression):
        if name.endswith(("_bucket", "_sum", "_count")):
            name = name.rpartition("_")[0]
        found.append((name, set(re.findall(r"(\w+)(?:=|!)", selectors))))
    return found


@pytest.mark.anyio
async def test_all_that_dashboard_and_alerts_ask_for_is_there(client: httpx.AsyncClient) -> None:
    told = (await scrape(client)).names
    labels = documented_metrics()
    for expression in EXPRESSIONS + ALERT_EXPRESSIONS:
        grouped = {
            label
            for group in re.findall(r"by \(([^)]*)\)", expression)
            for label in group.split(", ")
        }
        known = set(FROM_PROMETHEUS)
        for name, selected in metrics_in(expression):
            assert name in told, expression
            assert selected <= labels[name] | FROM_PROMETHEUS, expression
            known |= labels[name]
        assert grouped <= known, expression


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for expression in EXPRESSIONS for name, _ in metrics_in(expression)}
    assert documented_metrics().keys() - shown == set()


def test_panels_lie_beside_each_other() -> None:
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        places = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not places & taken, panel["title"]
        taken |= places


def test_what_grafana_shows_comes_from_the_source_it_is_given() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__rate_interval", "__all"}
    assert used == variables


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_is_explained(rule: dict[str, Any]) -> None:
    assert f"`{rule['alert']}`" in OPERATIONS
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_prometheus_takes_configuration_rules_and_the_dashboard_s_queries(tmp_path: Path) -> None:
    config = ROOT / "deploy" / "prometheus" / "prometheus.yml"
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
    queries = [
        {"record": f"query_{i}", "expr": e.replace("$__rate_interval", "1m").replace("$model", "m")}
        for i, e in enumerate(EXPRESSIONS)
    ]
    rules = tmp_path / "queries.yml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": queries}]}))
    done = subprocess.run(["promtool", "check", "rules", rules], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compose_profile_mounts_what_there_is_and_finds_the_server() -> None:
    services = COMPOSE["services"]
    watching = {n: s for n, s in services.items() if s["profiles"] == ["monitoring"]}
    assert watching.keys() == {"prometheus", "grafana"}
    for service in watching.values():
        assert service["ports"][0].split(":-")[1].startswith("127.0.0.1:")
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists()
            else:
                assert source in COMPOSE["volumes"]
    [job] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())[
        "scrape_configs"
    ]
    [target] = job["static_configs"][0]["targets"]
    name, port = target.split(":")
    for kind in ("cpu", "gpu"):
        server = services[f"seqserve-{kind}"]
        assert server["networks"]["default"]["aliases"] == [name]
        assert server["ports"][0].endswith(f":{port}")


def test_grafana_is_provisioned_with_the_source_and_the_dashboard() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    [provider] = yaml.safe_load((folder / "dashboards" / "seqserve.yml").read_text())["providers"]
    mounted = [v.split(":")[1] for v in COMPOSE["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/seqserve.json" in mounted
