"""What a page of a browser could change in a server."""

import contextlib
import http.client
import json

from tests.support.bus import SAFETY_NET_SECONDS
from tests.support.server import LiveServer


def picture(live: LiveServer) -> tuple[object, ...]:
    """MQs with what was published, channels with what was taken, and the tree."""

    def look() -> tuple[object, ...]:
        groups = live.server.broker.groups
        assert groups is not None
        topics = {name: topic.partitions[0].next_offset for name, topic in live.server.topic_list.topics().items()}
        return topics, {(group.topic.name, group.name): group.info().lag for group in groups.all()}

    return (*live.call(look), tree(live))


def tree(live: LiveServer) -> dict[str, object]:
    """Everything in the tree, as a tool reads it, but what the server says of its clients."""
    pairs = json.loads(_read(live, "/api/v1/pget/%23"))
    return {pair["key"]: pair["value"] for pair in pairs if not pair["key"].startswith("$SYS")}


def export(live: LiveServer) -> bytes:
    """The tree as the text that an import takes."""
    return _read(live, "/api/v1/export", accept="text/plain")


def _read(live: LiveServer, url: str, **headers: str) -> bytes:
    with contextlib.closing(
        http.client.HTTPConnection(live.server.addresses["worterbuch"], timeout=SAFETY_NET_SECONDS)
    ) as connection:
        connection.request("GET", url, headers=headers)
        with connection.getresponse() as response:
            assert response.status == 200
            return response.read()
