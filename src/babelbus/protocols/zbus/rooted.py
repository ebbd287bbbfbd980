"""Messages of clients with a root (docs/access.md): the name of the MQ becomes absolute on its way in, and relative on
its way out. Urls stay as they are: where they lead is looked up below the root.
"""

from typing import Final

import msgspec

from babelbus.core.access import Root
from babelbus.core.rooted import NAMING
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.routing import BindTable
from babelbus.records.envelope import SUBJECT_HEADER

_SUBJECT: Final = SUBJECT_HEADER.decode()
_NAMING: Final = [name.decode() for name in NAMING]


class Bindings:
    """The bound urls below a root."""

    def __init__(self, table: BindTable, root: Root) -> None:
        self._table = table
        self._root = root

    def find(self, url: str) -> str | None:
        """Return the MQ of the longest prefix, as the client calls it."""
        mq = self._table.find(bound(url, self._root))
        return None if mq is None else self._root.relative(mq)


def bound(url: str, root: Root) -> str:
    """Return the url that stands in the table for a url below a root; no url of HTTP begins like that."""
    return f"\0{root.prefix}{url}"


def absolute(message: Message, root: Root) -> Message:
    """Return a command with the MQ that the client means."""
    mq = message.headers.get("mq")
    if mq is None:
        return message
    headers = {**message.headers, "mq": root.absolute(mq)}
    if headers.get(_SUBJECT, "").startswith(f"{mq}/"):
        headers[_SUBJECT] = root.absolute(headers[_SUBJECT])
    return msgspec.structs.replace(message, headers=headers)


def relative_answer(message: Message, root: Root) -> Message:
    """Return an answer that the server has made, as the client sees it."""
    headers, body = message.headers, message.body
    if "mq" in headers:
        headers = {**headers, "mq": root.relative(headers["mq"])}
    if body is not None and message.body_kind == "text":
        body = root.relative_text(body.decode()).encode()
    return msgspec.structs.replace(message, headers=headers, body=body)


def relative_delivery(message: Message, root: Root) -> Message:
    """Return a stored message as the client sees it; its MQ is relative already."""
    headers, url = message.headers, message.url
    for name in (*_NAMING, "key"):
        if name in headers:
            headers = {**headers, name: root.relative(headers[name])}
    if url is not None and url.startswith(f"/{root.prefix}"):  # of a question from another protocol
        url = "/" + root.relative(url[1:])
    return msgspec.structs.replace(message, headers=headers, url=url)
