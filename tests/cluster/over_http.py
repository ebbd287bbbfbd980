"""Clients over HTTP: zbus with a request for each message, EventMesh with a webhook, and EventMesh over gRPC."""

import itertools
import json
import os
import queue
import threading
import zlib
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import grpc

from babelbus.protocols.eventmesh.stubs import legacy_pb2
from tests.cluster.workload import LOOK_SECONDS, REPLY_SECONDS, WINDOW, Consumer, Publisher, RefusedError
from tests.support.cluster import BusCluster, Member
from tests.support.http import Response
from tests.support.zbus import HttpClient

IDENTITY = {"env": "e", "idc": "i", "ip": "1.1.1.1", "pid": "7", "sys": "s", "language": "JAVA"}
PACKAGE = "/eventmesh.common.protocol.grpc"
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each client
    ("grpc.http2.bdp_probe", 0),  # the window of a stream stays 64 KiB
]

# -- zbus --------------------------------------------------------------------------------------------------------------


class WebQueuePublisher(Publisher):
    """Publishes over zbus, a request for each message."""

    protocol = "zbus-http"

    def session(self, member: Member) -> None:
        with HttpClient(member.addresses["zbus"], timeout_seconds=REPLY_SECONDS) as client:
            while self.goes_on():
                self.publish(partial(self._send, client))

    def _send(self, client: HttpClient, value: str) -> bool:
        response = client.do("pub", value.encode(), mq=self.topic, id=value, content_type="text/plain")
        return response.status == 200


class Taker(Consumer):
    """A channel of zbus that is asked for messages."""

    style = "queue"
    protocol = "zbus-http"

    def session(self, member: Member) -> None:
        with HttpClient(member.addresses["zbus"], timeout_seconds=REPLY_SECONDS) as client:
            if client.do("create", mq=self.topic, channel="taker").status != 200:
                raise RefusedError(self.topic)
            self.joined()
            self.listen(partial(self._take, client))

    def _take(self, client: HttpClient) -> bool:
        response = client.do("take", mq=self.topic, channel="taker", window=str(WINDOW))
        if response.status == 604:
            self.stopping.wait(LOOK_SECONDS)
            return False
        if response.status != 200:
            raise RefusedError(response)
        for message in json.loads(response.body):
            self.got(message["body"], 0, int(message["headers"]["offset"]))
        return True


# -- EventMesh over HTTP -----------------------------------------------------------------------------------------------


class WebMeshPublisher(Publisher):
    """Publishes over EventMesh by HTTP, with the coded API and with addresses."""

    protocol = "eventmesh-http"

    def session(self, member: Member) -> None:
        with HttpClient(member.addresses["eventmesh-http"], timeout_seconds=REPLY_SECONDS) as client:
            while self.goes_on():
                self.publish(partial(self._send, client))

    def _send(self, client: HttpClient, value: str) -> bool:
        if self.chance.random() < 0.5:
            path = f"/eventmesh/publish/{self.topic}"
            return is_success(client.ask("POST", path, value.encode(), content_type="text/plain"))
        fields = {"producergroup": "P", "topic": self.topic, "content": value, "bizseqno": "1", "uniqueid": value}
        return is_success(client.ask("POST", "/", urlencode(fields).encode(), **IDENTITY, code="104"))


def is_success(response: Response) -> bool:
    """Return whether EventMesh has done what it was asked for."""
    return response.status == 200 and bool(json.loads(response.body)["retCode"] == 0)


class WebhookConsumer(Consumer):
    """A consumer group of EventMesh with a webhook, which subscribes once: the subscription survives all faults.

    A session is the process that pushes: a process pushes nothing again that the webhook has taken. What came last
    over a connection that ended may come again: its answer may not have arrived.
    """

    style = "group"
    protocol = "eventmesh-http"

    def run(self) -> None:
        self._hook = _Hook(self)
        with self._hook:
            threading.Thread(target=self._hook.serve_forever, args=(LOOK_SECONDS / 10,), daemon=True).start()
            super().run()
            self._hook.shutdown()

    def session(self, member: Member) -> None:
        self._change(member, "subscribe")
        self.joined()
        self.stopping.wait()
        self._change(self.chance.choice(self.cluster.members), "unsubscribe")

    def _change(self, member: Member, action: str) -> None:
        url = f"http://127.0.0.1:{self._hook.server_port}/push"
        body = json.dumps({"url": url, "consumerGroup": f"group-{self.name}", "topic": [self.topic]}).encode()
        with HttpClient(member.addresses["eventmesh-http"], timeout_seconds=REPLY_SECONDS) as client:
            response = client.ask("POST", f"/eventmesh/{action}/local", body, content_type="application/json")
            if not is_success(response):
                raise RefusedError(response)


class _Hook(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, consumer: Consumer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.consumer = consumer
        self.unanswered: set[str] = set()
        """Values that came last over connections that ended."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Hook

    def setup(self) -> None:
        super().setup()
        self._last = ""
        self._process = process_of(self.server.consumer.cluster, self.client_address[1], self.server.server_port)

    def handle(self) -> None:
        with suppress(ConnectionError):  # a member was killed
            super().handle()
        self.server.unanswered.add(self._last)

    def do_OPTIONS(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode())
        self._last = form["content"][0]
        is_again = self._last in self.server.unanswered
        self.server.consumer.got(self._last, session=next(_unknown) if is_again else self._process)
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


_unknown = itertools.count(-1, -1)


def process_of(cluster: BusCluster, port: int, to_port: int) -> int:
    """Return a number for the member's process that has made a connection on loopback; a new one if it has ended.

    A member that begins again keeps its process id. It has other addresses in its memory, which the kernel tells.
    """
    ends = [f":{port:04X}", f":{to_port:04X}"]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    names = {f"socket:[{row[9]}]" for row in rows if [row[1][-5:], row[2][-5:]] == ends}
    for member in cluster.members:
        with suppress(OSError):  # the process has ended
            addresses = Path(f"/proc/{member.pid}/auxv").read_bytes()
            for link in Path(f"/proc/{member.pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # the file was closed
                    if os.readlink(link) in names:
                        return zlib.crc32(addresses, member.pid)
    return next(_unknown)


# -- EventMesh over gRPC -----------------------------------------------------------------------------------------------


class RpcPublisher(Publisher):
    """Publishes over EventMesh by gRPC."""

    protocol = "eventmesh-grpc"

    def session(self, member: Member) -> None:
        with grpc.insecure_channel(member.addresses["eventmesh-grpc"], OPTIONS) as channel:
            publish = channel.unary_unary(
                f"{PACKAGE}.PublisherService/publish",
                request_serializer=legacy_pb2.SimpleMessage.SerializeToString,
                response_deserializer=legacy_pb2.Response.FromString,
            )
            while self.goes_on():
                self.publish(partial(self._send, publish))

    def _send(self, publish: Any, value: str) -> bool:
        message = legacy_pb2.SimpleMessage(
            header=legacy_pb2.RequestHeader(**IDENTITY, username="u", password="p"), producerGroup="P",
            topic=self.topic, content=value, ttl="60000", uniqueId=value, seqNum=value,
        )  # fmt: skip
        try:
            return bool(publish(message, timeout=REPLY_SECONDS).respCode == "0")
        except grpc.RpcError as error:
            raise RefusedError(error) from error


class StreamConsumer(Consumer):
    """A consumer group of EventMesh by gRPC, which has no acknowledgement: what is written to the stream is done."""

    style = "stream"
    protocol = "eventmesh-grpc"

    def session(self, member: Member) -> None:
        asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with grpc.insecure_channel(member.addresses["eventmesh-grpc"], OPTIONS) as channel:
            call = channel.stream_stream(
                f"{PACKAGE}.ConsumerService/subscribeStream",
                request_serializer=legacy_pb2.Subscription.SerializeToString,
                response_deserializer=legacy_pb2.SimpleMessage.FromString,
            )(iter(asked.get, None))
            came: queue.SimpleQueue[Any] = queue.SimpleQueue()
            threading.Thread(target=_pump, args=(call, came), daemon=True).start()
            try:
                asked.put(self._subscription())
                self._begin(came)
                self.joined()
                self.listen(partial(self._take, came))
            finally:
                asked.put(None)
                call.cancel()

    def _subscription(self) -> Any:
        return legacy_pb2.Subscription(
            header=legacy_pb2.RequestHeader(**IDENTITY, username="u", password="p"),
            consumerGroup=f"group-{self.name}",
            subscriptionItems=[legacy_pb2.Subscription.SubscriptionItem(topic=self.topic)],
        )

    def _begin(self, came: "queue.SimpleQueue[Any]") -> None:
        """Wait for the answer to the subscription; without one there may have been a session all the same."""
        try:
            answer = _next(came, REPLY_SECONDS)
            if json.loads(answer.content)["respCode"] != "0":
                raise RefusedError(answer)
        except (queue.Empty, RefusedError) as error:
            self.history.add(self.name, "left", topic=self.topic, session=self.sessions, style=self.style)
            raise RefusedError(error) from error

    def _take(self, came: "queue.SimpleQueue[Any]") -> bool:
        try:
            self.got(_next(came, LOOK_SECONDS).content)
        except queue.Empty:
            return False
        return True


def _pump(call: Any, came: "queue.SimpleQueue[Any]") -> None:
    """Hand over the messages of a stream, and its end."""
    try:
        for message in call:
            came.put(message)
        came.put(EOFError("the server completed the stream"))
    except grpc.RpcError as error:
        came.put(error)


def _next(came: "queue.SimpleQueue[Any]", seconds: float) -> Any:
    found = came.get(timeout=seconds)
    if isinstance(found, Exception):
        raise RefusedError(found) from found
    return found
