"""The files of deploy/: settings, metrics and ports in them exist, and the programs that read them accept them."""

import configparser
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from babelbus.config import describe, load
from babelbus.metrics import Metrics

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "babelbus.service"
CONTAINERFILE = DEPLOY / "container" / "Containerfile"
COMPOSE = DEPLOY / "container" / "compose.yaml"
KUBERNETES = DEPLOY / "kubernetes" / "babelbus.yaml"
ALERTS = DEPLOY / "monitoring" / "alerts.yml"
DASHBOARD = DEPLOY / "monitoring" / "dashboard.json"
LABELS_OF_PROMETHEUS = {"instance", "job", "le"}
FUNCTIONS = {"sum", "rate", "increase", "delta", "topk", "histogram_quantile", "by", "and", "up", "label_values"}


def read_documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]


def default_ports() -> dict[str, int]:
    settings = load(None, {}, {})
    return {
        "jebp": settings.jebp.port,
        "worterbuch": settings.worterbuch.port,
        "worterbuch-tcp": settings.worterbuch.tcp_port,
        "zbus": settings.zbus.port,
        "eventmesh-tcp": settings.eventmesh.tcp_port,
        "eventmesh-http": settings.eventmesh.http_port,
        "eventmesh-grpc": settings.eventmesh.grpc_port,
        "admin": settings.admin.port,
    }


def variables() -> set[str]:
    return {f"BABELBUS_{entry.key.replace('.', '_').upper()}" for entry in describe()} | {"BABELBUS_CONFIG"}


# -- systemd -----------------------------------------------------------------------------------------------------------


def test_the_unit_waits_for_the_server_and_lets_it_do_little_else() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # names of systemd keep their letters
    unit.read(UNIT, encoding="utf-8")
    service = unit["Service"]
    assert service["Type"] == "notify"
    assert service["User"] not in ("", "root")
    hardening = ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "RestrictNamespaces")
    assert all(service[name] == "yes" for name in hardening)
    assert (service["ProtectSystem"], service["CapabilityBoundingSet"]) == ("strict", "")


def test_the_unit_lets_the_process_that_searches_change_its_priority() -> None:
    lines = UNIT.read_text(encoding="utf-8").splitlines()
    filters = [line.partition("=")[2] for line in lines if line.startswith("SystemCallFilter=")]
    assert filters[-1].split() == ["setpriority", "sched_setscheduler"]  # behind the line that refuses @resources


def test_systemd_takes_the_unit_and_calls_its_exposure_ok(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("the unit is not checked: systemd-analyze is not installed")
    text = UNIT.read_text(encoding="utf-8").replace("/opt/babelbus/bin/babelbus", sys.executable)
    copy = tmp_path / UNIT.name
    copy.write_text(text.replace("Documentation=man:babelbus(1)\n", ""))
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    assert UNIT.name not in done.stderr, done.stderr
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", "--threshold=20", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-400:] + done.stderr


# -- containers --------------------------------------------------------------------------------------------------------


def test_the_image_runs_as_nobody_special_with_settings_that_exist_and_all_ports() -> None:
    text = CONTAINERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line and not line.startswith("#")]
    stages = [rest for name, rest in lines if name == "FROM"]
    assert len(stages) == 2
    assert not any("/" in stage.partition(" AS ")[0] for stage in stages), "an image is named without a registry"
    (user,) = [rest for name, rest in lines if name == "USER"]
    assert int(user.partition(":")[0]) > 0
    assert set(re.findall(r"BABELBUS_\w+(?==)", text)) <= variables()
    (ports,) = [rest.split() for name, rest in lines if name == "EXPOSE"]
    assert set(map(int, ports)) == set(default_ports().values())
    assert any(name == "HEALTHCHECK" for name, _ in lines)
    assert {rest.split()[-1] for name, rest in lines if name == "STOPSIGNAL"} == {"SIGTERM"}


def test_a_server_with_the_settings_of_the_image_starts_and_its_health_check_finds_it(tmp_path: Path) -> None:
    text = CONTAINERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    settings = dict(re.findall(r"(BABELBUS_\w+)=(\S+)", text)) | {"BABELBUS_DATA_FOLDER": str(tmp_path / "data")}
    command = [sys.executable, "-c", "from babelbus.cli import main; main()", "serve", "--server-any-port", "--json"]
    process = subprocess.Popen(
        command, env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        try:
            addresses = json.loads(process.stdout.readline())["addresses"]
            assert {address.partition(":")[0] for address in addresses.values() if ":" in address} == {"0.0.0.0"}
            check: list[str] = json.loads(re.findall(r"HEALTHCHECK.*?CMD (\[.*\])", text)[0])
            port = addresses["admin"].rpartition(":")[2]
            done = subprocess.run([sys.executable, *[part.replace("8600", port) for part in check[1:]]], check=False)
            assert done.returncode == 0
            assert load(None, settings, {}).access.mode == "enforce"
        finally:
            process.terminate()


def test_the_compose_file_names_files_settings_and_ports_that_exist() -> None:
    (compose,) = read_documents(COMPOSE)
    services = compose["services"]
    server = services["babelbus"]
    assert (COMPOSE.parent / server["build"]["context"] / server["build"]["dockerfile"]).samefile(CONTAINERFILE)
    assert set(server["environment"]) <= variables()
    assert {int(port.split(":")[-1]) for port in server["ports"]} == set(default_ports().values())
    for service in services.values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert source in compose["volumes"] or (COMPOSE.parent / source).is_file(), mount


# -- Kubernetes --------------------------------------------------------------------------------------------------------


def manifest(kind: str) -> dict[str, Any]:
    (found,) = [document for document in read_documents(KUBERNETES) if document["kind"] == kind]
    return found


def test_the_manifests_fit_each_other_and_the_settings(tmp_path: Path) -> None:
    stateful, service = manifest("StatefulSet"), manifest("Service")
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert stateful["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == default_ports()
    assert {(port["targetPort"], port["port"]) for port in service["spec"]["ports"]} == set(ports.items())
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
        assert container[probe]["httpGet"]["path"] in ("/ready", "/health")
    volumes = {volume["name"] for volume in stateful["spec"]["template"]["spec"]["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in stateful["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    (name, text), *others = manifest("ConfigMap")["data"].items()
    assert not others
    assert container["args"] == ["serve", "--config", f"/etc/babelbus/{name}"]
    (tmp_path / name).write_text(text)
    assert load(str(tmp_path / name), {}, {}).admin.open_metrics


def test_the_manifests_have_the_schema_of_kubernetes() -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="the schemas of Kubernetes are not installed: pip install kubernetes-validate"
    )
    for document in read_documents(KUBERNETES):
        validator.validate(document, validator.latest_version(), strict=True)


# -- proxies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Caddyfile", "nginx.conf"])
def test_a_proxy_passes_on_to_ports_that_exist(name: str) -> None:
    text = (DEPLOY / "proxy" / name).read_text(encoding="utf-8")
    assert set(map(int, re.findall(r"127\.0\.0\.1:(\d+)", text))) <= set(default_ports().values())


def test_caddy_takes_its_file() -> None:
    if (caddy := shutil.which("caddy")) is None:
        pytest.skip("the file is not checked: caddy is not installed")
    command = [caddy, "validate", "--adapter", "caddyfile", "--config", str(DEPLOY / "proxy" / "Caddyfile")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_nginx_takes_its_file(tmp_path: Path) -> None:
    nginx, openssl = shutil.which("nginx"), shutil.which("openssl")
    if nginx is None or openssl is None:
        pytest.skip("the file is not checked: nginx or openssl is not installed")
    key, certificate = tmp_path / "bus.key", tmp_path / "bus.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=bus.example"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], capture_output=True, check=True)
    text = (DEPLOY / "proxy" / "nginx.conf").read_text(encoding="utf-8")
    text = re.sub(r"(ssl_certificate\s+)\S+;", rf"\1{certificate};", text)
    text = re.sub(r"(ssl_certificate_key\s+)\S+;", rf"\1{key};", text)
    copy = tmp_path / "nginx.conf"
    modules = "include /etc/nginx/modules-enabled/*.conf;"  # Debian has `stream` as a module of its own
    copy.write_text(f"{modules}\npid {tmp_path}/nginx.pid;\n{text}")
    done = subprocess.run([nginx, "-t", "-p", tmp_path, "-c", copy], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- monitoring --------------------------------------------------------------------------------------------------------


def known_metrics() -> dict[str, set[str]]:
    """Return the names that a query may use, each with its labels."""
    metrics = Metrics()
    known = {one.name: set(one.labels) for one in metrics.describe()}
    for one in metrics.describe():
        if one.type == "histogram":
            known |= {f"{one.name}_{part}": set(one.labels) for part in ("bucket", "sum", "count")}
    return known | {sample.name: set() for family in metrics.registry.collect() for sample in family.samples
                    if sample.name.startswith("process_")}  # fmt: skip


def queries() -> Iterator[tuple[str, str, str]]:
    """Yield where a query stands, the query, and the text that shows its labels."""
    (alerts,) = read_documents(ALERTS)
    for group in alerts["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], json.dumps(rule["annotations"])
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target.get("legendFormat", "")
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"], ""


@pytest.mark.parametrize(("place", "query", "shown"), list(queries()), ids=[place for place, *_ in queries()])
def test_every_metric_and_label_of_alerts_and_dashboard_exists(place: str, query: str, shown: str) -> None:
    known = known_metrics()
    names = set(re.findall(r"\b(?:babelbus|process)_\w+", query))
    assert names or "up{" in query
    assert names <= set(known)
    labels = set[str]().union(LABELS_OF_PROMETHEUS, *(known[name] for name in names))
    used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)) | set(re.findall(r"\$labels\.(\w+)", shown))
    for part in re.findall(r"\bby\s*\(([^)]*)\)", query):
        used |= set(part.replace(" ", "").split(","))
    if "$labels" not in shown:
        used |= set(re.findall(r"\{\{(\w+)\}\}", shown))
    assert used <= labels
    words = set(re.findall(r"[a-z_]+", re.sub(r"\{[^}]*\}|\[[^\]]*\]|\([^()]*\)|\"[^\"]*\"", " ", query)))
    assert words - names <= FUNCTIONS | labels


def test_the_alerts_have_what_an_operator_needs_and_prometheus_takes_them() -> None:
    (alerts,) = read_documents(ALERTS)
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 10
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
    if (promtool := shutil.which("promtool")) is not None:
        subprocess.run([promtool, "check", "rules", str(ALERTS)], capture_output=True, check=True)


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        cells = {(x, y) for x in columns for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
