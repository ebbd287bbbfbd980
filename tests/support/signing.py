"""The client's half of zbus signatures: messages with their proof."""

import msgspec

from babelbus.protocols.zbus.codec import encode_message
from babelbus.protocols.zbus.messages import Message
from babelbus.protocols.zbus.signature import canonical_text, digest, request_text


def sign_frame(message: Message, api_key: str, secret: str, sign_fields: str | None = None) -> Message:
    """Return a message with its proof, to be sent as `encode_message` has it."""
    message = _with_key(message, api_key, sign_fields)
    canonical = canonical_text(encode_message(message), sign_fields=sign_fields)
    return _with(message, "signature", digest(secret, canonical))


def sign_request(message: Message, api_key: str, secret: str, sign_fields: str) -> Message:
    """Return a message with its proof, to be sent as an HTTP request with just these headers, url, method and body."""
    message = _with_key(message, api_key, sign_fields)
    return _with(message, "signature", digest(secret, request_text(message, sign_fields)))


def _with_key(message: Message, api_key: str, sign_fields: str | None) -> Message:
    message = _with(message, "apiKey", api_key)
    return message if sign_fields is None else _with(message, "signFields", sign_fields)


def _with(message: Message, name: str, value: str) -> Message:
    return msgspec.structs.replace(message, headers={**message.headers, name: value})
