"""Deployment files: they parse, agree on ports and paths, use flags that exist, and ask for metrics that exist."""

import inspect
import json
import re
import runpy
from pathlib import Path
from typing import Any

import yaml

from octavo.config import options
from octavo.server import health
from octavo.server.options import ServerOptions, server_options
from test_metrics import Watched

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
PORT = 8000


def flags() -> set[str]:
    return {"--config", *("--" + option.name.replace("_", "-") for option in (*options(), *server_options()))}


def routes() -> set[str]:
    return {route.path for route in health.router.routes if hasattr(route, "path")}


def served_names() -> set[str]:
    return set(re.findall(r"^# TYPE (\S+)", Watched().metrics.render().decode(), re.MULTILINE))


def test_the_dashboard_is_written_by_its_script_and_asks_for_what_there_is() -> None:
    text = (DEPLOY / "grafana.json").read_text()
    assert text == runpy.run_path(str(ROOT / "scripts" / "grafana.py"))["text"](), "run: python scripts/grafana.py"
    board = json.loads(text)
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    expressions += [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    names = served_names()
    known = names | {f"{name}_bucket" for name in names}
    used = {name for text in expressions for name in re.findall(r"((?:octavo:|http_)\w+)", text)}
    assert len(used) > 20
    assert used <= known, used - known
    assert all(text.count(a) == text.count(b) for text in expressions for a, b in ("()", "[]", "{}"))
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24, "panels overlap or stick out"


def test_the_metrics_page_is_the_catalogue() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "metrics.py"))["page"]
    assert (ROOT / "docs" / "metrics.md").read_text() == page(), "run: python scripts/metrics.py"


def test_prometheus() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] in routes()
    assert job["static_configs"] == [{"targets": [f"localhost:{PORT}"]}]


def test_kubernetes() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    kinds: dict[str, Any] = {document["kind"]: document for document in documents}
    pod = kinds["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    given = dict(arg.removeprefix("--").split("=", 1) for arg in container["args"] if arg.startswith("--"))
    assert {f"--{name}" for name in given} <= flags()
    (port,) = container["ports"]
    assert port["containerPort"] == int(given["port"]) == PORT
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": port["name"]}
    assert container["startupProbe"]["httpGet"]["path"] == "/livez"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert {"/livez", "/ready"} <= routes()
    assert pod["spec"]["terminationGracePeriodSeconds"] > float(given["shutdown-timeout"])
    service = kinds["Service"]["spec"]
    assert service["ports"][0]["targetPort"] == port["name"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert kinds["Deployment"]["spec"]["selector"]["matchLabels"] == service["selector"]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert pod["metadata"]["annotations"]["prometheus.io/path"] in routes()


def test_systemd() -> None:
    text = (DEPLOY / "octavo.service").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and line[0] not in "#[")
    command = settings["ExecStart"].split()
    assert command[1] == "serve"
    given = [part for part in command if part.startswith("--")]
    assert set(given) <= flags()
    drain = float(command[command.index("--shutdown-timeout") + 1])
    assert float(settings["TimeoutStopSec"]) > drain
    assert settings["KillSignal"] == "SIGTERM"


def test_the_image() -> None:
    lines = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text()).splitlines()
    instructions = [line.split(None, 1) for line in lines if line and line[0] not in "# \t"]
    known = {"ARG", "FROM", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL"}
    assert {word for word, _ in instructions} <= known | {"ENTRYPOINT", "CMD"}
    by_word: dict[str, str] = dict(instructions)
    assert json.loads(by_word["ENTRYPOINT"]) == ["octavo", "serve"]
    assert int(by_word["EXPOSE"]) == PORT == inspect.signature(ServerOptions).parameters["port"].default
    assert by_word["USER"] != "root"
    assert f":{PORT}/livez" in by_word["HEALTHCHECK"]
    for word, rest in instructions:
        for source in rest.split()[:-1] if word == "COPY" else ():
            assert (ROOT / source).exists(), source
    extras = re.search(r'"\.\[([\w,]+)\]"', (DEPLOY / "Dockerfile").read_text())
    assert extras
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{name} = ", project, re.MULTILINE) for name in extras[1].split(","))


def test_documented_flags_exist() -> None:
    for name in ("deploy.md", "metrics.md"):
        text = (ROOT / "docs" / name).read_text()
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {"--build-arg", "--gpus"}
        assert named <= flags(), named - flags()
