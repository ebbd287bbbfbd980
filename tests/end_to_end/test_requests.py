"""One bus: everybody who can ask is answered by everybody who can answer, whatever protocol the two speak."""

import base64
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from babelbus.cli import program
from babelbus.config import EventmeshSettings, ZbusSettings
from tests.cli.shell import COMMAND, ENVIRONMENT
from tests.protocols.eventmesh.test_grpc import Legacy
from tests.protocols.eventmesh.test_http import Hook
from tests.protocols.eventmesh.test_http import ask as ask_mesh
from tests.protocols.eventmesh.test_http import subscribe as subscribe_hook
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.eventmesh import MeshClient
from tests.support.server import LiveServer, configure
from tests.support.zbus import HttpClient, SocketClient

TTL = str(int(SAFETY_NET_SECONDS * 1000))
ENCODED = "content-encoding"
ARBITRARY = bytes(range(256))
Responder = Callable[[LiveServer, str, ExitStack], None]
Asker = Callable[[LiveServer, str, bytes, str], bytes]


def answer(payload: bytes) -> bytes:
    """The reply of every responder: JSON to JSON."""
    return b'{"asked":%b}' % payload


def answer_text(text: str, properties: Any) -> str:
    """The reply to a text of EventMesh, which is base64 where its properties say so."""
    if properties.get(ENCODED) == "base64":
        return base64.b64encode(answer(base64.b64decode(text))).decode()
    return answer(text.encode()).decode()


# -- who answers: until the stack is closed ----------------------------------------------------------------------------


def work(step: Callable[[], None], stack: ExitStack) -> None:
    """Do a step again and again in a thread, until its connection is closed."""

    def run() -> None:
        with suppress(OSError, grpc.RpcError, StopIteration, EOFError):
            while True:
                step()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    stack.callback(thread.join, SAFETY_NET_SECONDS)


def tcp_responder(live: LiveServer, topic: str, stack: ExitStack) -> None:
    client = stack.enter_context(MeshClient(live.server.addresses["eventmesh-tcp"]))
    client.hello(group="tcp").listen(topic, kind="SYNC")

    def step() -> None:
        _, body = client.push()
        text = answer_text(body["body"], body["properties"])
        client.send("RESPONSE_TO_SERVER", {**body, "body": text})

    work(step, stack)
    stack.callback(client.socket.shutdown, 2)


def grpc_responder(live: LiveServer, topic: str, stack: ExitStack) -> None:
    package = Legacy(stack.enter_context(grpc.insecure_channel(live.server.addresses["eventmesh-grpc"])))
    finish = ExitStack()
    stream = finish.enter_context(package.stream("grpc", topic, kind="SYNC"))

    def step() -> None:
        question = stream.next()
        stream.say(package.reply(question, answer_text(package.text(question), question.properties)))

    work(step, stack)
    stack.callback(finish.close)


def webhook_responder(live: LiveServer, topic: str, stack: ExitStack) -> None:
    web = stack.enter_context(HttpClient(live.server.addresses["eventmesh-http"]))
    hook = stack.enter_context(Hook())
    subscribe_hook(web, hook, topic, "hook", kind="SYNC")

    def step() -> None:
        form, headers = hook.next()
        if not form:
            raise EOFError
        assert headers["code"] == "106"
        text = answer_text(form["content"], json.loads(form["extFields"]))
        fields = {"origtopic": topic, "content": text, "extFields": form["extFields"], "producergroup": "hook"}
        assert ask_mesh(web, "301", fields)["retCode"] == 0

    work(step, stack)
    stack.callback(hook.pushes.put, ({}, {}))


def zbus_responder(live: LiveServer, topic: str, stack: ExitStack) -> None:
    client = stack.enter_context(SocketClient(live.server.addresses["zbus"]))
    assert client.do("create", mq=topic, channel=topic)["status"] == 200
    assert client.do("sub", mq=topic, channel=topic)["status"] == 200

    def step() -> None:
        call = client.next()
        body, headers = call["body"], {"target": call["headers"]["source"], "id": call["headers"]["id"]}
        if isinstance(body, str):
            client.say("route", answer(body.encode()).decode(), **headers, **{"content-type": "text/plain"})
        else:
            client.say("route", {"asked": body}, **headers)

    work(step, stack)
    stack.callback(client.socket.shutdown, 2)


def command_responder(live: LiveServer, topic: str, stack: ExitStack) -> None:
    command = ["respond", topic, "--exec", "printf '{\"asked\":'; cat; printf '}'", *place(live)]
    process = subprocess.Popen([*COMMAND, *command], stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert process.stderr is not None
    stack.callback(process.stderr.close)
    stack.callback(process.wait, SAFETY_NET_SECONDS)
    stack.callback(process.terminate)
    assert process.stderr.readline()


RESPONDERS: dict[str, Responder] = {
    "mesh-tcp": tcp_responder,
    "mesh-grpc": grpc_responder,
    "mesh-webhook": webhook_responder,
    "zbus": zbus_responder,
    "command": command_responder,
}


# -- who asks ----------------------------------------------------------------------------------------------------------


def tcp_asker(live: LiveServer, topic: str, payload: bytes, _type: str) -> bytes:
    with MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="q") as client:
        message = {"topic": topic, "body": payload.decode(), "properties": {"ttl": TTL}}
        client.send("REQUEST_TO_SERVER", message, seq="r")
        header, body = client.next()
        assert (header["cmd"], header["seq"]) == ("RESPONSE_TO_CLIENT", "r")
        return str(body["body"]).encode()


def http_asker(live: LiveServer, topic: str, payload: bytes, _type: str) -> bytes:
    with HttpClient(live.server.addresses["eventmesh-http"]) as web:
        fields = {"producergroup": "P", "topic": topic, "content": payload.decode(), "ttl": TTL}
        told = ask_mesh(web, "101", fields)
        assert told["retCode"] == 0, told
        return str(json.loads(told["retMsg"])["body"]).encode()


def grpc_asker(live: LiveServer, topic: str, payload: bytes, _type: str) -> bytes:
    with grpc.insecure_channel(live.server.addresses["eventmesh-grpc"]) as channel:
        package = Legacy(channel)
        return package.text(package.ask("requestReply", package.publication(topic, payload.decode()))).encode()


def zbus_asker(live: LiveServer, topic: str, payload: bytes, content_type: str) -> bytes:
    with HttpClient(live.server.addresses["zbus"]) as client:
        response = client.ask("POST", f"/{topic}", payload, content_type=content_type)
        assert response.status == 200, response.body
        return bytes(response.body)


def command_asker(live: LiveServer, topic: str, payload: bytes, content_type: str) -> bytes:
    args = ["request", topic, payload.decode(), "--content-type", content_type, "--timeout", f"{TTL}ms", *place(live)]
    done = CliRunner().invoke(program, args)
    assert done.exit_code == 0, done.stderr
    return done.stdout_bytes


ASKERS: dict[str, Asker] = {
    "mesh-tcp": tcp_asker,
    "mesh-http": http_asker,
    "mesh-grpc": grpc_asker,
    "zbus": zbus_asker,
    "command": command_asker,
}


def place(live: LiveServer) -> list[str]:
    return ["--data-folder", live.config.data.folder, "--admin", live.server.addresses["admin"]]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    mesh = EventmeshSettings(tcp_port=0, http_port=0, grpc_port=0, webhook_networks="127.0.0.0/8")
    zbus = ZbusSettings(port=0, rpc_timeout_seconds=SAFETY_NET_SECONDS)
    folder = tmp_path_factory.mktemp("requests")
    with LiveServer(configure(folder, eventmesh=mesh, zbus=zbus, admin=True)) as server, ExitStack() as stack:
        for topic, begin in RESPONDERS.items():
            begin(server, topic, stack)
        yield server


@pytest.mark.parametrize("responder", RESPONDERS)
@pytest.mark.parametrize("asker", ASKERS)
def test_everybody_who_asks_is_answered_by_everybody(live: LiveServer, asker: str, responder: str) -> None:
    ask = ASKERS[asker]
    assert ask(live, responder, "schön".encode(), "text/plain") == answer("schön".encode())
    value = {"a": [1, None, "ü"]}
    assert json.loads(ask(live, responder, json.dumps(value).encode(), "application/json")) == {"asked": value}


@pytest.mark.parametrize("responder", RESPONDERS)
def test_bytes_are_answered_with_bytes(live: LiveServer, responder: str) -> None:
    reply = zbus_asker(live, responder, ARBITRARY, "application/octet-stream")
    # A service of zbus over WebSocket has JSON alone: it gets base64, and answers with what it wrote.
    assert reply == answer(base64.b64encode(ARBITRARY) if responder == "zbus" else ARBITRARY)


def test_nobody_is_told_to_everybody(live: LiveServer) -> None:
    with HttpClient(live.server.addresses["eventmesh-http"]) as web, HttpClient(live.server.addresses["zbus"]) as zbus:
        fields = {"producergroup": "P", "topic": "nobody", "content": "?", "ttl": TTL}
        assert ask_mesh(web, "101", fields)["retCode"] == 4
        assert zbus.ask("POST", "/nobody", b"?").status == 404
    assert CliRunner().invoke(program, ["request", "nobody", "?", *place(live)]).exit_code == 3
