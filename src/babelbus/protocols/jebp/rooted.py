"""Requests of clients with a root (docs/access.md): the names in them become absolute, once and at the edge."""

from typing import Any

import msgspec

from babelbus.core.access import Root
from babelbus.core.rooted import absolute_batch
from babelbus.protocols.jebp.messages import CreateRecords, Request, StageRecords


def absolute(request: Request, root: Root) -> Request:
    """Return a request with the names that the client means."""
    changes: dict[str, Any] = {}
    if isinstance(request, CreateRecords | StageRecords):
        changes["records"] = absolute_batch(request.records, request.topic, root)
    topic, topics = getattr(request, "topic", None), getattr(request, "topics", None)
    if topic is not None:
        changes["topic"] = root.absolute(topic)
    if topics is not None:
        changes["topics"] = tuple(map(root.absolute, topics))
    if hasattr(request, "after"):
        changes["after"] = root.absolute(request.after)
    return msgspec.structs.replace(request, **changes) if changes else request
