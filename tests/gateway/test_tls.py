"""HTTPS at the real endpoint, with a certificate that nobody has signed."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import httpx
import openai
import pytest

from muxserve.cli import http as cli_http
from muxserve.cli.http import HTTPFailure, get_json
from muxserve.cli.ready import endpoint, trust
from muxserve.spec import TlsSpec
from tests.gateway.playing import play
from tests.gateway.rig import Rig, Running
from tests.gateway.unit_specs import fleet_of, model
from tests.support.patience import PATIENCE, eventually
from tests.support.ports import free_port
from tests.support.tiny_checkpoint import tiny_checkpoint

# Made by openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj /CN=fleet.example
# -addext subjectAltName=DNS:fleet.example,IP:127.0.0.1; worth nothing outside of tests.
CERTIFICATES = Path(__file__).parents[1] / "support/certificates"


def put(name: str, directory: Path) -> tuple[Path, Path]:
    """Have a certificate and its key in a directory."""
    files = directory / "cert.pem", directory / "key.pem"
    for file, suffix in zip(files, ("pem", "key"), strict=True):
        shutil.copy(CERTIFICATES / f"{name}.{suffix}", file)
    return files


@pytest.fixture(scope="module")
def encrypted(rig: Rig, gateway: Running) -> Running:
    """One of two gateways."""
    directory = rig.directory / "tls"
    directory.mkdir()
    cert, key = put("first", directory)
    fleet = fleet_of(
        directory,
        [model("alpha", tiny_checkpoint())],
        unit="tls",
        port=free_port(),
        count=2,
        tls=TlsSpec(str(cert), str(key)),
    )
    running = rig.start(fleet)
    running.engines()
    return running


def url_of(running: Running) -> str:
    return endpoint(running.fleet.gateway)


def cert_of(running: Running) -> str:
    tls = running.fleet.gateway.tls
    assert tls is not None
    return tls.cert


def test_clients_that_trust_the_certificate_are_served(encrypted: Running) -> None:
    context = ssl.create_default_context(cafile=cert_of(encrypted))
    with httpx.Client(verify=context, timeout=PATIENCE) as http:
        client = openai.OpenAI(base_url=f"{url_of(encrypted)}/v1", api_key="x", max_retries=0, http_client=http)
        streamed = client.completions.create(model="alpha", prompt=play("under the seal"), stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == "under the seal"


def test_nobody_else_is_and_one_without_tls_is_not(encrypted: Running) -> None:
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{url_of(encrypted)}/health", timeout=PATIENCE)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{encrypted.fleet.gateway.port}/health", timeout=PATIENCE)


def test_other_gateways_are_told_without(encrypted: Running) -> None:
    transport = httpx.HTTPTransport(uds=encrypted.fleet.socket("http-0"))
    with httpx.Client(transport=transport, timeout=PATIENCE) as http:
        assert "muxserve_requests_total" in http.get("http://gateway/metrics/own").text


def test_commands_on_this_machine_trust_the_fleets_own(encrypted: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_http, "trusted", {})
    monkeypatch.setattr("muxserve.cli.ready.trusted", cli_http.trusted)
    with pytest.raises(HTTPFailure, match="certificate verify failed"):
        get_json(url_of(encrypted), "/health", timeout=PATIENCE)
    trust(encrypted.fleet.gateway)
    # Also under a name that the certificate has not.
    local = url_of(encrypted).replace("127.0.0.1", "localhost")
    cli_http.trusted[local] = cert_of(encrypted)
    for url in (url_of(encrypted), local):
        assert get_json(url, "/health", timeout=PATIENCE)[1]["models"]["alpha"]["status"] == "up"


def test_a_renewed_certificate_is_taken(encrypted: Running) -> None:
    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", encrypted.fleet.gateway.port), timeout=PATIENCE)

    def of(name: str) -> str:
        return (CERTIFICATES / f"{name}.pem").read_text()

    file = Path(cert_of(encrypted))
    assert shown().split() == of("first").split()
    # One that cannot be used changes nothing.
    file.write_text("no certificate")
    eventually(lambda: "the certificate before stays" in encrypted.log, "told")
    assert shown().split() == of("first").split()
    put("second", file.parent)
    eventually(lambda: shown().split() == of("second").split(), "renewed")
