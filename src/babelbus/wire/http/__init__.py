"""HTTP/1.1 without I/O (RFC 9112): bytes -> requests, responses -> bytes."""

from babelbus.wire.http.chunks import encode_chunk
from babelbus.wire.http.client import Response, ResponseDecoder
from babelbus.wire.http.decoder import RequestDecoder
from babelbus.wire.http.fields import HEAD_BYTES_MAX, TOKEN, HttpError, encode_fields, read_fields, tokens
from babelbus.wire.http.request import Request, RequestRun
from babelbus.wire.http.response import CONTINUE, encode_error, encode_response, encode_stream_head
from babelbus.wire.http.session import IDLE_SECONDS, HttpSession
from babelbus.wire.http.static_files import File, FileRefusedError, Files
from babelbus.wire.http.target import parse_form, parse_query, percent_decode, split_target

__all__ = [
    "CONTINUE",
    "HEAD_BYTES_MAX",
    "IDLE_SECONDS",
    "TOKEN",
    "File",
    "FileRefusedError",
    "Files",
    "HttpError",
    "HttpSession",
    "Request",
    "RequestDecoder",
    "RequestRun",
    "Response",
    "ResponseDecoder",
    "encode_chunk",
    "encode_error",
    "encode_fields",
    "encode_response",
    "encode_stream_head",
    "parse_form",
    "parse_query",
    "percent_decode",
    "read_fields",
    "split_target",
    "tokens",
]
