"""EventMesh over gRPC against a real server, with gRPC's own client: both packages on one port."""

import json
import queue
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory

from babelbus.protocols.eventmesh.stubs import cloudevents_pb2, legacy_pb2
from tests.protocols.eventmesh.test_http import Hook
from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.eventmesh import MeshClient
from tests.support.server import LiveServer

IDENTITY = {"env": "e", "idc": "i", "ip": "1.1.1.1", "pid": "7", "sys": "s", "username": "u", "language": "JAVA"}


@pytest.fixture
def channel(live: LiveServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(live.server.addresses["eventmesh-grpc"]) as channel:
        yield channel


class Package(ABC):
    """The stubs of one package, and messages of it that say the same."""

    module: Any

    def __init__(self, channel: grpc.Channel, user: str = "u", password: str = "p", token: str = "") -> None:
        self._channel = channel
        self.identity = {**IDENTITY, "username": user}
        self.password, self.token = password, token

    def _method(self, name: str) -> Any:
        for service in self.module.DESCRIPTOR.services_by_name.values():
            method = service.methods_by_name.get(name)
            if method is not None:
                kind = "stream_stream" if name == "subscribeStream" else "unary_unary"
                return getattr(self._channel, kind)(
                    f"/{service.full_name}/{name}",
                    request_serializer=message_factory.GetMessageClass(method.input_type).SerializeToString,
                    response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
                )
        raise KeyError(name)

    def ask(self, name: str, message: Any) -> Any:
        return self._method(name)(message, timeout=SAFETY_NET_SECONDS)

    @contextmanager
    def stream(self, group: str, topic: str, mode: str = "CLUSTERING", kind: str = "ASYNC") -> Iterator["Listening"]:
        asked: queue.Queue[Any] = queue.Queue()
        call = self._method("subscribeStream")(iter(asked.get, None), timeout=SAFETY_NET_SECONDS)
        asked.put(self.subscription(group, topic, mode, kind))
        try:
            acknowledgement = next(call)
            if not self.is_acknowledgement(acknowledgement):
                raise PermissionError(str(acknowledgement))
            yield Listening(self, call, asked)
        finally:
            asked.put(None)
            call.cancel()

    @abstractmethod
    def subscription(
        self, group: str, topic: str, mode: str = "CLUSTERING", kind: str = "ASYNC", url: str = ""
    ) -> Any: ...

    @abstractmethod
    def is_acknowledgement(self, message: Any) -> bool:
        """See the packages below."""

    @abstractmethod
    def publication(self, topic: str, text: str, **more: str) -> Any:
        """See the packages below."""

    @abstractmethod
    def batch(self, topic: str, *texts: str) -> Any:
        """See the packages below."""

    @abstractmethod
    def code(self, answer: Any) -> str:
        """See the packages below."""

    @abstractmethod
    def text(self, message: Any) -> str:
        """See the packages below."""

    @abstractmethod
    def reply(self, message: Any, text: str) -> Any:
        """See the packages below."""

    @abstractmethod
    def heartbeat(self, group: str, topic: str, *, is_subscriber: bool = True) -> Any:
        """See the packages below."""


class Listening:
    def __init__(self, package: Package, call: Any, asked: "queue.Queue[Any]") -> None:
        self._package, self._call, self._asked = package, call, asked

    def next(self) -> Any:
        return next(self._call)

    def text(self) -> str:
        return self._package.text(self.next())

    def say(self, message: Any) -> None:
        self._asked.put(message)

    def cancel(self) -> None:
        self._call.cancel()


class Legacy(Package):
    module = legacy_pb2

    def _header(self, **more: str) -> Any:
        return legacy_pb2.RequestHeader(**self.identity, password=self.password, **more)

    def publication(self, topic: str, text: str, **more: str) -> Any:
        return legacy_pb2.SimpleMessage(
            header=self._header(), producerGroup="P", topic=topic, content=text, ttl="60000", uniqueId="u1",
            seqNum="s1", properties=more,
        )  # fmt: skip

    def batch(self, topic: str, *texts: str) -> Any:
        item = legacy_pb2.BatchMessage.MessageItem
        items = [item(content=text, ttl="60000", uniqueId=text, seqNum=text) for text in texts]
        return legacy_pb2.BatchMessage(header=self._header(), producerGroup="P", topic=topic, messageItem=items)

    def subscription(self, group: str, topic: str, mode: str = "CLUSTERING", kind: str = "ASYNC", url: str = "") -> Any:
        item = legacy_pb2.Subscription.SubscriptionItem(topic=topic, mode=mode, type=kind)
        return legacy_pb2.Subscription(header=self._header(), consumerGroup=group, subscriptionItems=[item], url=url)

    def is_acknowledgement(self, message: Any) -> bool:
        assert (message.topic, message.seqNum, message.uniqueId) == ("", "", "")
        assert message.HasField("header")
        return bool(json.loads(message.content)["respCode"] == "0")

    def code(self, answer: Any) -> str:
        return str(answer.respCode)

    def text(self, message: Any) -> str:
        assert message.seqNum
        assert message.uniqueId
        assert message.HasField("header")
        return str(message.content)

    def reply(self, message: Any, text: str) -> Any:
        reply = legacy_pb2.Subscription.Reply(
            producerGroup="P", topic=message.topic, content=text, uniqueId="x", properties=message.properties
        )
        return legacy_pb2.Subscription(header=self._header(), consumerGroup="c", reply=reply)

    def heartbeat(self, group: str, topic: str, *, is_subscriber: bool = True) -> Any:
        item = legacy_pb2.Heartbeat.HeartbeatItem(topic=topic, url="grpc_stream")
        return legacy_pb2.Heartbeat(
            header=self._header(), clientType=int(is_subscriber), consumerGroup=group, heartbeatItems=[item]
        )


class Events(Package):
    module = cloudevents_pb2

    def _event(self, data: dict[str, Any], **attributes: str) -> Any:
        proof = {"passwd": self.password} | ({"token": self.token} if self.token else {})
        event = cloudevents_pb2.CloudEvent(id="1", source="/", spec_version="1.0", type="t", **data)
        for name, value in {**self.identity, "protocoltype": "eventmeshmessage", **proof, **attributes}.items():
            event.attributes[name].ce_string = value
        return event

    def publication(self, topic: str, text: str, **more: str) -> Any:
        attributes = {"subject": topic, "producergroup": "P", "uniqueid": "u1", "seqnum": "s1", "ttl": "60000", **more}
        return self._event({"text_data": text}, **attributes)

    def batch(self, topic: str, *texts: str) -> Any:
        return cloudevents_pb2.CloudEventBatch(events=[self.publication(topic, text) for text in texts])

    def subscription(self, group: str, topic: str, mode: str = "CLUSTERING", kind: str = "ASYNC", url: str = "") -> Any:
        text = json.dumps([{"topic": topic, "mode": mode, "type": kind}])
        more = {"url": url} if url else {}
        return self._event({"text_data": text}, consumergroup=group, datacontenttype="application/json", **more)

    def is_acknowledgement(self, message: Any) -> bool:
        assert not {"seqnum", "uniqueid"} & set(message.attributes)
        assert isinstance(json.loads(message.text_data), list)
        return self.code(message) == "0"

    def code(self, answer: Any) -> str:
        found = {answer.attributes[name].ce_string for name in ("statuscode", "status_code")}
        assert answer.attributes["responsemessage"].ce_string == answer.attributes["response_message"].ce_string
        assert answer.attributes["time"].ce_timestamp.seconds
        (code,) = found
        return str(code)

    def text(self, message: Any) -> str:
        assert all(message.attributes[name].ce_string for name in ("seqnum", "uniqueid", "subject", "protocoltype"))
        assert all(value.WhichOneof("attr") for value in message.attributes.values())
        assert not any("_" in name for name in message.attributes)
        assert message.id
        assert message.type
        return str(message.text_data)

    def reply(self, message: Any, text: str) -> Any:
        reply = cloudevents_pb2.CloudEvent()
        reply.CopyFrom(message)
        reply.text_data = text
        reply.attributes["submessagetype"].ce_string = "subscription_reply"
        return reply

    def heartbeat(self, group: str, topic: str, *, is_subscriber: bool = True) -> Any:
        event = self._event({"text_data": json.dumps([{"topic": topic, "url": "grpc_stream"}])}, consumergroup=group)
        event.attributes["clienttype"].ce_integer = 2 if is_subscriber else 1
        return event


@pytest.fixture(params=[Legacy, Events], ids=["legacy", "cloudevents"])
def package(request: pytest.FixtureRequest, channel: grpc.Channel) -> Package:
    made = request.param(channel)
    assert isinstance(made, Package)
    return made


def test_what_is_published_comes_on_a_stream_of_each_group(package: Package, channel: grpc.Channel) -> None:
    topic = f"rpc/{type(package).__name__}"
    with (
        package.stream("a", topic) as one,
        Legacy(channel).stream("b", topic) as two,
        Events(channel).stream("c", topic) as three,
    ):
        assert package.code(package.ask("publish", package.publication(topic, "first", colour="red"))) == "0"
        assert package.code(package.ask("batchPublish", package.batch(topic, "x", "y", "z"))) == "0"
        for stream in (one, two, three):
            assert [stream.text() for _ in range(4)] == ["first", "x", "y", "z"]


def test_broadcasting_reaches_every_stream(package: Package) -> None:
    topic = f"rpc/all/{type(package).__name__}"
    with package.stream("a", topic, "BROADCASTING") as one, package.stream("a", topic, "BROADCASTING") as two:
        package.ask("publish", package.publication(topic, "x"))
        assert (one.text(), two.text()) == ("x", "x")


def test_what_a_broken_stream_was_not_sent_goes_to_the_next(package: Package) -> None:
    topic = f"rpc/again/{type(package).__name__}"
    with package.stream("g", topic):
        pass
    package.ask("publish", package.publication(topic, "meanwhile"))
    with package.stream("g", topic) as stream:
        assert stream.text() == "meanwhile"


def test_a_request_is_answered_on_a_stream_and_over_tcp(live: LiveServer, package: Package) -> None:
    topic = f"rpc/ask/{type(package).__name__}"
    with package.stream("s", topic, kind="SYNC") as responder:
        with MeshClient(live.server.addresses["eventmesh-tcp"]).hello(group="q") as requester:
            requester.send(
                "REQUEST_TO_SERVER", {"topic": topic, "body": "who", "properties": {"ttl": "60000"}}, seq="r"
            )
            question = responder.next()
            assert package.text(question) == "who"
            responder.say(package.reply(question, "me"))
            assert requester.next()[1]["body"] == "me"
        future = package._method("requestReply").future(package.publication(topic, "what"), timeout=SAFETY_NET_SECONDS)
        responder.say(package.reply(responder.next(), "that"))
        assert package.text(future.result()) == "that"


def test_a_request_that_nobody_answers_is_told_at_once(channel: grpc.Channel) -> None:
    legacy, events = Legacy(channel), Events(channel)
    answer = legacy.ask("requestReply", legacy.publication("rpc/nobody", "?"))
    assert (answer.topic, answer.seqNum, json.loads(answer.content)["respCode"]) == ("", "", "22")
    with pytest.raises(grpc.RpcError) as caught:
        events.ask("requestReply", events.publication("rpc/nobody", "?"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_heartbeats_of_a_stream_are_known_and_others_told_to_subscribe_again(package: Package) -> None:
    topic = f"rpc/beat/{type(package).__name__}"
    assert package.code(package.ask("heartbeat", package.heartbeat("h", topic))) == "30"
    with package.stream("h", topic):
        assert package.code(package.ask("heartbeat", package.heartbeat("h", topic))) == "0"
        assert package.code(package.ask("heartbeat", package.heartbeat("h", topic, is_subscriber=False))) == "7"
        assert package.code(package.ask("unsubscribe", package.subscription("h", topic))) == "0"
        assert package.code(package.ask("heartbeat", package.heartbeat("h", topic))) == "30"


def test_a_webhook_is_subscribed_and_pushed_to(package: Package) -> None:
    topic = f"rpc/hook/{type(package).__name__}"
    with Hook() as hook:
        assert package.code(package.ask("subscribe", package.subscription("w", topic, url=hook.url))) == "0"
        package.ask("publish", package.publication(topic, "x"))
        assert hook.next()[0]["content"] == "x"
        assert package.code(package.ask("unsubscribe", package.subscription("w", topic))) == "0"
        assert package.code(package.ask("subscribe", package.subscription("w", topic))) == "7"


@pytest.mark.parametrize("name", ["env", "pid", "sys", "language"])
def test_who_says_too_little_of_itself_gets_code_6(package: Package, name: str) -> None:
    message = package.publication("t", "x")
    if isinstance(package, Legacy):
        setattr(message.header, name, "")
    else:
        del message.attributes[name]
    assert package.code(package.ask("publish", message)) == "6"


def test_a_message_that_says_too_little_gets_code_7(package: Package) -> None:
    assert package.code(package.ask("publish", package.publication("", "x"))) == "7"
    assert package.code(package.ask("publish", package.publication("a\0", "x"))) == "14"


def test_cloud_events_keep_their_attributes_and_data(channel: grpc.Channel) -> None:
    events = Events(channel)
    with events.stream("ce", "rpc/ce") as stream:
        for field, data, content_type in (
            ("text_data", "[1]", "application/json"), ("binary_data", b"\xff\0", "image/png"),
            ("text_data", "t", "text/plain"),
        ):  # fmt: skip
            message = events.publication(
                "rpc/ce", "", protocoltype="cloudevents", datacontenttype=content_type, ext="e"
            )
            setattr(message, field, data)
            message.id, message.source, message.type = "my-id", "/my", "my.type"
            assert events.code(events.ask("publish", message)) == "0"
            got = stream.next()
            assert (got.id, got.source, got.type, getattr(got, field)) == ("my-id", "/my", "my.type", data)
            assert (got.attributes["ext"].ce_string, got.attributes["datacontenttype"].ce_string) == ("e", content_type)
            assert not {"username", "passwd", "pid", "ip"} & set(got.attributes)


def test_one_way_publications_have_no_answer(channel: grpc.Channel) -> None:
    events = Events(channel)
    with events.stream("o", "rpc/one-way") as stream:
        events.ask("publishOneWay", events.publication("rpc/one-way", "x"))
        events.ask("batchPublishOneWay", events.batch("rpc/one-way", "y"))
        assert [stream.text(), stream.text()] == ["x", "y"]
