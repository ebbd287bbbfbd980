"""Commands of EventMesh over TCP and the objects in their bodies (docs/specifications/eventmesh.md, 3.2 to 3.4)."""

from typing import Any, Final, Literal

import msgspec

HEARTBEAT = "HEARTBEAT_REQUEST"
HELLO = "HELLO_REQUEST"
GOODBYE = "CLIENT_GOODBYE_REQUEST"
SERVER_GOODBYE = "SERVER_GOODBYE_REQUEST"
SERVER_GOODBYE_RESPONSE = "SERVER_GOODBYE_RESPONSE"
SUBSCRIBE = "SUBSCRIBE_REQUEST"
UNSUBSCRIBE = "UNSUBSCRIBE_REQUEST"
LISTEN = "LISTEN_REQUEST"
REQUEST = "REQUEST_TO_SERVER"
RESPONSE = "RESPONSE_TO_SERVER"
RESPONSE_TO_CLIENT = "RESPONSE_TO_CLIENT"
RESPONSE_TO_CLIENT_ACK = "RESPONSE_TO_CLIENT_ACK"
ASYNC_MESSAGE = "ASYNC_MESSAGE_TO_SERVER"
BROADCAST_MESSAGE = "BROADCAST_MESSAGE_TO_SERVER"
REDIRECT = "REDIRECT_TO_CLIENT"
RECOMMEND = "RECOMMEND_REQUEST"
PUSH_ASYNC = "ASYNC_MESSAGE_TO_CLIENT"
PUSH_BROADCAST = "BROADCAST_MESSAGE_TO_CLIENT"
PUSH_REQUEST = "REQUEST_TO_CLIENT"

ANSWERS: Final = {
    HEARTBEAT: "HEARTBEAT_RESPONSE",
    HELLO: "HELLO_RESPONSE",
    GOODBYE: "CLIENT_GOODBYE_RESPONSE",
    SUBSCRIBE: "SUBSCRIBE_RESPONSE",
    UNSUBSCRIBE: "UNSUBSCRIBE_RESPONSE",
    LISTEN: "LISTEN_RESPONSE",
    REQUEST: RESPONSE_TO_CLIENT,
    ASYNC_MESSAGE: "ASYNC_MESSAGE_TO_SERVER_ACK",
    BROADCAST_MESSAGE: "BROADCAST_MESSAGE_TO_SERVER_ACK",
    RECOMMEND: "RECOMMEND_RESPONSE",
    "REGISTER_REQUEST": "REGISTER_RESPONSE",
    "UNREGISTER_REQUEST": "UNREGISTER_RESPONSE",
}
"""The command of the answer to each request that has an answer."""
PUBLICATIONS: Final = frozenset((ASYNC_MESSAGE, BROADCAST_MESSAGE))
PUSH_ACKS: Final = frozenset((f"{PUSH_ASYNC}_ACK", f"{PUSH_BROADCAST}_ACK", f"{PUSH_REQUEST}_ACK"))
UNANSWERED: Final = frozenset(
    (SERVER_GOODBYE_RESPONSE, RESPONSE_TO_CLIENT_ACK, "SYS_LOG_TO_LOGSERVER", "TRACE_LOG_TO_LOGSERVER")
)
"""Commands that the server accepts and drops."""

Flavour = Literal["eventmeshmessage", "cloudevents", "http"]
"""The payload flavours (2.1); TCP carries the first two."""
MESSAGE: Final[Flavour] = "eventmeshmessage"
CLOUD_EVENT: Final[Flavour] = "cloudevents"
HTTP: Final[Flavour] = "http"


class Header(msgspec.Struct, gc=False):
    """The header of a frame; `command` is `cmd` for Java 1.2 (3.2)."""

    cmd: str | None = None
    command: str | None = None
    seq: str | int | None = None
    properties: dict[str, Any] | None = None
    desc: str | None = None

    @property
    def name(self) -> str | None:
        """The name of the command."""
        return self.cmd or self.command


class Frame(msgspec.Struct, gc=False):
    """One frame; `body` is empty if the frame has none, or the literal `null`."""

    header: Header
    body: bytes


class UserAgent(msgspec.Struct):
    """The body of HELLO, which describes a client; `producerGroup` and `consumerGroup` come from Java 1.2 and 1.3."""

    env: str | None = None
    subsystem: str | None = None
    path: str | None = None
    pid: int | str | None = None
    version: str | None = None
    username: str | None = None
    password: str | None = None
    token: str | None = None
    idc: str | None = None
    group: str | None = None
    purpose: str | None = None
    producerGroup: str | None = None  # noqa: N815 - the name on the wire
    consumerGroup: str | None = None  # noqa: N815 - the name on the wire

    @property
    def group_name(self) -> str:
        """The group, empty if the client names none."""
        old = self.consumerGroup if self.purpose == "sub" else self.producerGroup
        return (self.group or old or "").strip()


class SubscriptionItem(msgspec.Struct, frozen=True):
    """A topic that a session subscribes to."""

    topic: str
    mode: Literal["CLUSTERING", "BROADCASTING"] = "CLUSTERING"
    type: Literal["ASYNC", "SYNC"] = "ASYNC"


class Subscription(msgspec.Struct):
    """The body of SUBSCRIBE; a plain string subscribes to a topic by CLUSTERING and ASYNC."""

    topicList: list[SubscriptionItem | str]  # noqa: N815 - the name on the wire


class EventMeshMessage(msgspec.Struct, gc=False):
    """The JSON of a message of flavour `eventmeshmessage` (2.2)."""

    topic: str | None = None
    properties: dict[str, Any] | None = None
    headers: dict[str, Any] | None = None
    body: str | None = None
