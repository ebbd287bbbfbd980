"""What tests do with the topic `work` and its group `g` over the administration endpoint."""

import json
from typing import Any

from babelbus.core.record import Event
from tests.support.bus import publish as publish_events
from tests.web.test_state import Api

GROUP = "/api/topics/work/groups/g"


def publish(api: Api, *payloads: bytes, subject: str = "work", **fields: Any) -> None:
    events = [Event(subject, payload, **fields) for payload in payloads]
    api.live.call(lambda: publish_events(api.live.server.broker, events))


def make_group(api: Api, name: str = "g", **settings: Any) -> None:
    body = {"topic": "work", "name": name, "settings": {"ack": "explicit"} | settings, "start": {"at": "beginning"}}
    assert api("POST", "/api/groups", json.dumps(body).encode())[0] == 201
