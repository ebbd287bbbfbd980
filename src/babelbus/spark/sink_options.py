"""The options of the sink: names, accepted values, and what they mean; all refusals happen here, on the driver."""

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from babelbus.protocols.jebp.frames import FRAME_BYTES_MAX
from babelbus.spark.errors import OptionError, OutputModeError
from babelbus.spark.option_values import SERVER_ALIASES, normalise, read_bytes, read_choice, read_count, wrong_value
from babelbus.spark.options import NAMES as SOURCE_NAMES
from babelbus.spark.options import SERVER_VARIABLE, Place, read_place

NAMES = (
    "url", "identity", "serverFingerprint", "requestTimeoutMs",
    "topic", "table", "partitioner", "deadLetterTopic", "maxRecordBytes", "txnId", "batchId", "delivery",
)  # fmt: skip
_SPARKS_OWN = {name.lower(): name for name in ("checkpointLocation", "queryName", "path")}
"""Options that Spark adds, and that `save(path)` adds."""
RECORD_BYTES_MAX = FRAME_BYTES_MAX - 64 * 1024
"""Largest record that one request can stage: a frame without the ids and the topic's name."""
RECORD_BYTES_MIN = 1024
ID_BYTES_MAX = 512
INT64_MAX = 2**63 - 1

Kind = Literal["batch", "stream"]
Partitioning = Literal["key", "spread"]


class SinkOptions(msgspec.Struct, frozen=True):
    """The checked options of a write.

    `transaction` is empty where none can be derived: a save gets a fresh one, a stream one for each run.
    """

    place: Place
    topic: str
    to_state: bool
    dead_letter_topic: str
    record_bytes_max: int
    transaction: str
    batch_id: int
    """Of a save with `txnId`; -1 otherwise."""
    partitioner: Partitioning = "key"


def parse_sink(given: Mapping[str, str], kind: Kind) -> SinkOptions:
    """Check the options of a write and return what they mean.

    Raises:
        OptionError: an option is unknown, missing, wrong, or does not go with another option.
    """
    known = SERVER_ALIASES | _SPARKS_OWN | {name.lower(): name for name in NAMES}
    for name in SOURCE_NAMES:
        if name.lower() not in known and name.lower() in given:
            raise OptionError(
                f"option {name} is for reading: leave it out to write. A view (INSERT INTO) cannot be written to:"
                " write with df.write.format('babelbus')"
            )
    options = normalise(given, NAMES, SERVER_ALIASES | _SPARKS_OWN, "the sink")
    if "path" in options:
        raise OptionError("option path (or save(path), start(path)) is for reading: to write give url, the server")
    if not options.get("url", os.environ.get(SERVER_VARIABLE)):
        raise OptionError("option url is missing: give the server that the rows go to, as jebp://127.0.0.1:5320")
    for name in ("delivery",) if kind == "batch" else ("batchId",):
        if name in options:
            other = "streams: a save is done once" if kind == "batch" else "saves: a stream has batch ids of its own"
            raise OptionError(f"option {name} is for {other}")
    for name in ("topic", "deadLetterTopic", "txnId"):
        if name in options and not options[name].strip():
            raise wrong_value(name, options[name], "a name, or leave the option out")
    to_state = "table" in options and read_choice(options, "table", ("state",), "state") == "state"
    if to_state and "topic" not in options:
        raise OptionError('option topic is missing: table=state is written through a topic with retain="last"')
    if to_state and options.get("deadLetterTopic") == options["topic"]:
        raise wrong_value("deadLetterTopic", options["topic"], "another topic than the one of the state")
    transaction, batch_id = _transaction(options, kind)
    return SinkOptions(
        place=read_place(options),
        topic=options.get("topic", ""),
        to_state=to_state,
        dead_letter_topic=options.get("deadLetterTopic", ""),
        record_bytes_max=_record_bytes(options),
        transaction=transaction,
        batch_id=batch_id,
        partitioner=_partitioner(options, to_state=to_state),
    )


def check_mode(options: SinkOptions, kind: Kind, *, overwrite: bool) -> None:
    """Check that the output mode is one that a log can do.

    Raises:
        OutputModeError: a log cannot do the output mode.
    """
    if not overwrite:
        return
    if kind == "batch":
        raise OutputModeError("mode overwrite: a topic is only appended to, write .mode('append')")
    if not options.to_state:
        raise OutputModeError(
            "output mode complete would publish the whole result again with every batch: use append with a watermark,"
            " table=state (where each key is set), or foreachBatch with the options txnId and batchId"
        )


def _partitioner(options: Mapping[str, str], *, to_state: bool) -> Partitioning:
    found = read_choice(options, "partitioner", get_args(Partitioning), "key")
    if found == "spread":
        if to_state:
            raise OptionError(
                "options partitioner=spread and table=state do not go together: what a key was set to has an order only"
                " in one partition"
            )
        return "spread"
    return "key"


def _record_bytes(options: Mapping[str, str]) -> int:
    size = read_bytes(options, "maxRecordBytes") or RECORD_BYTES_MAX
    if not RECORD_BYTES_MIN <= size <= RECORD_BYTES_MAX:
        raise wrong_value(
            "maxRecordBytes", options["maxRecordBytes"], f"{RECORD_BYTES_MIN} to {RECORD_BYTES_MAX} bytes"
        )
    return size


def _transaction(options: Mapping[str, str], kind: Kind) -> tuple[str, int]:
    """Return the transaction id, and the batch id of a save."""
    named = options.get("txnId", "")
    if len(named.encode()) > ID_BYTES_MAX:
        raise wrong_value("txnId", named, f"an id of 1 to {ID_BYTES_MAX} bytes")
    if kind == "batch":
        wanted = "a whole number from 0 on, that rises from save to save"
        number = read_count(options, "batchId", wanted, least=0, most=INT64_MAX)
        if bool(named) != (number is not None):
            raise OptionError("options txnId and batchId go together: a save is known again by both")
        return (named, number) if number is not None else ("", -1)
    delivery = read_choice(options, "delivery", ("exactly-once", "at-least-once"), "exactly-once")
    if delivery == "at-least-once":
        if named:
            raise OptionError("options txnId and delivery=at-least-once do not go together")
        return "", -1
    if named:
        return named, -1
    for name in ("checkpointLocation", "queryName"):
        value = options.get(name)
        if value:
            return f"spark {name} {hashlib.sha256(_plain(value).encode()).hexdigest()[:40]}", -1
    raise OptionError(
        "exactly once needs an id that stays: give the option checkpointLocation (to this writer, not to the session),"
        " a query name or txnId; or delivery=at-least-once"
    )


def _plain(location: str) -> str:
    """Return one of the ways to write a folder."""
    return re.sub("^file:/+", "/", location).rstrip("/")
