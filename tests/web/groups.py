"""What tests do with the topic `work` and its group `g` over the administration endpoint."""

import json
from typing import Any

from babelbus.core.record import Event
from tests.web.test_state import Api

GROUP = "/api/topics/work/groups/g"


def publish(api: Api, *payloads: bytes, subject: str = "work", **fields: Any) -> None:
    api.live.publish([Event(subject, payload, **fields) for payload in payloads])


def make_group(api: Api, name: str = "g", **settings: Any) -> None:
    body = {"topic": "work", "name": name, "settings": {"ack": "explicit"} | settings, "start": {"at": "beginning"}}
    assert api("POST", "/api/groups", json.dumps(body).encode())[0] == 201
