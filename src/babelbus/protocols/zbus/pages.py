"""Pages for browsers: the welcome page, the list of MQs of the monitor, the icon.

Specification: docs/specifications/zbus.md, 3, 6.1 and 9.
"""

import html
import struct
from collections.abc import Sequence
from typing import Any

from babelbus.protocols.zbus.messages import Message

HTML_TYPE = "text/html; charset=utf-8"
FAVICON_URL = "/favicon.ico"
_STYLE = "body{font-family:sans-serif;margin:2em}td,th{padding:.2em 1em;text-align:left}"


def _make_icon() -> bytes:
    """Return an icon of 16 by 16 pixels, of one colour: ICO file := directory, bitmap (32 bits a pixel), mask."""
    side = 16
    bitmap = struct.pack("<IiiHHIIiiII", 40, side, 2 * side, 1, 32, 0, 0, 0, 0, 0, 0)
    bitmap += b"\xb0\x60\x20\xff" * (side * side) + bytes(4 * side)
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, side, side, 0, 0, 1, 32, len(bitmap), 22) + bitmap


ICON = _make_icon()


def icon(request_id: str | None) -> Message:
    """Return the icon that browsers ask for."""
    return _reply(request_id, "image/x-icon", ICON)


def welcome(request_id: str | None, version: str) -> Message:
    """Return what stands at `/`."""
    page = (
        f"<!DOCTYPE html><html><head><title>Babelbus</title><style>{_STYLE}</style></head><body>"
        f"<h1>Babelbus {html.escape(version)}</h1><p>A message queue that speaks zbus. "
        "Try with curl: <code>/?cmd=create&amp;mq=hello&amp;channel=c</code>, "
        "<code>/?cmd=pub&amp;mq=hello&amp;body=hi</code> and "
        "<code>/?cmd=take&amp;mq=hello&amp;channel=c</code>.</p></body></html>"
    )
    return _page(request_id, page)


def monitor(request_id: str | None, queues: Sequence[dict[str, Any]]) -> Message:
    """Return the page of the monitor."""
    rows = "".join(
        f"<tr><td>{html.escape(queue['name'])}</td><td>{html.escape(queue['type'])}</td><td>{queue['messageDepth']}</td>"
        f"<td>{queue['consumerCount']}</td><td>{_channels(queue['channels'])}</td></tr>"
        for queue in queues
    )
    page = (
        f"<!DOCTYPE html><html><head><title>Queues</title><style>{_STYLE}</style></head><body><h1>Queues</h1><table>"
        f"<tr><th>MQ<th>type<th>messages<th>consumers<th>channels at offset</tr>{rows}</table></body></html>"
    )
    return _page(request_id, page)


def _channels(channels: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{html.escape(channel['name'])} at {channel['offset']}" for channel in channels)


def _page(request_id: str | None, page: str) -> Message:
    return _reply(request_id, HTML_TYPE, page.encode(), is_text=True)


def _reply(request_id: str | None, content_type: str, body: bytes, *, is_text: bool = False) -> Message:
    headers = {"content-type": content_type}
    if request_id is not None:
        headers["id"] = request_id
    return Message(headers, status=200, body=body, body_kind="text" if is_text else "bytes")
