"""The released Java SDK of EventMesh, unmodified, against our server. Run by `make interop`."""

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from babelbus.config import EventmeshSettings
from tests.support.eventmesh import MeshClient
from tests.support.server import LiveServer, configure

FOLDER = Path(__file__).parent / "eventmesh"
INSTALL_SECONDS = 300
SECONDS = 250


@pytest.fixture(scope="module")
def classpath(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The classpath of the SDK and what it needs, installed once by Maven."""
    if shutil.which("mvn") is None or shutil.which("javac") is None:
        pytest.skip("Maven and a JDK are needed for the Java SDK (Debian: apt-get install maven default-jdk)")
    cache = os.environ.get("BABELBUS_INTEROP_FOLDER")
    folder = Path(cache, "eventmesh") if cache else tmp_path_factory.mktemp("eventmesh")
    folder.mkdir(parents=True, exist_ok=True)
    ready = folder / "classpath"
    if not ready.exists():
        command = ["mvn", "-q", "-f", str(FOLDER / "pom.xml"), "dependency:build-classpath",
                   f"-Dmdep.outputFile={folder / 'found'}"]  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        if ran.returncode:
            pytest.skip(f"the Java SDK could not be installed: {ran.stdout[-300:]}")
        (folder / "found").rename(ready)
    return ready.read_text(encoding="utf-8").strip()


def run(classpath: str, program: str, *arguments: str) -> dict[str, str]:
    command = ["java", f"-Dlog4j.configurationFile={FOLDER / 'log4j2.xml'}", "-cp", classpath, str(FOLDER / program)]
    ran = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line.split(" ", 2) for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
    return {name: value for _, name, value in lines}


@pytest.mark.interop
def test_the_java_sdk_publishes_subscribes_broadcasts_and_asks_over_tcp(classpath: str, tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path)) as live:
        found = run(classpath, "Tcp.java", *live.server.addresses["eventmesh-tcp"].split(":"))
    assert found == {
        "publish": "ASYNC_MESSAGE_TO_SERVER_ACK 0",
        "async": "java-async first k",
        "broadcast": "everybody",
        "large": "true",
        "rr": "RESPONSE_TO_CLIENT true",
        "ce-publish": "0",
        "ce": "id-[1, 2] /test java-ce [1,2]",
        "end": "0",
    }


@contextlib.contextmanager
def responder(live: LiveServer, topic: str) -> Iterator[None]:
    """Somebody who answers one request over TCP."""
    with MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="answers") as client:
        client.listen(topic, kind="SYNC")

        def respond() -> None:
            _, body = client.push()
            client.send("RESPONSE_TO_SERVER", {**body, "body": f"{body['body']} over TCP"})

        thread = threading.Thread(target=respond, daemon=True)
        thread.start()
        yield
        thread.join()


SETTINGS = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, webhook_networks="127.0.0.0/8")


@pytest.mark.interop
def test_the_java_sdk_publishes_to_webhooks_and_asks_over_http(classpath: str, tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path, eventmesh=SETTINGS)) as live, responder(live, "asked"):
        found = run(classpath, "Http.java", live.server.addresses["eventmesh-http"], "asked")
    assert found == {
        "push": "java-http first & second 123 456",
        "ce": "true true",
        "rr": "a reply that the SDK cannot read",
        "end": "0",
    }


@pytest.mark.interop
def test_the_java_sdk_publishes_subscribes_and_asks_over_grpc(classpath: str, tmp_path: Path) -> None:
    with LiveServer(configure(tmp_path, eventmesh=SETTINGS)) as live, responder(live, "asked"):
        found = run(classpath, "Grpc.java", *live.server.addresses["eventmesh-grpc"].split(":"), "asked")
    assert found == {
        "rr": "who!",
        "publish": "0",
        "stream": "java-grpc first",
        "batch": "0",
        "batched": "xy",
        "ce-publish": "0",
        "ce": 'id /test java-grpc-ce {"a":1}',
        "rr-tcp": "who over TCP",
        "unsubscribe": "0",
    }
