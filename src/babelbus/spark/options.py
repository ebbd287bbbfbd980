"""The options of the source: names, accepted values, and what they mean; all refusals happen here, on the driver.

They have the names and meanings of Spark's Kafka source wherever it has them (docs/pipeline.md).
"""

import os
import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from babelbus.spark.errors import OptionError
from babelbus.spark.option_values import (
    SERVER_ALIASES,
    named_twice,
    normalise,
    read_bytes,
    read_choice,
    read_count,
    read_duration,
    read_flag,
    read_object,
    wrong_value,
)
from babelbus.spark.plan import Offsets

EARLIEST, LATEST = -2, -1
"""Stand for an offset, in JSON and everywhere behind it."""
SERVER_VARIABLE = "BABELBUS_SERVER"
IDENTITY_VARIABLE = "BABELBUS_IDENTITY"
FINGERPRINT_VARIABLE = "BABELBUS_SERVER_FINGERPRINT"
INT64_MAX = 2**63 - 1
GROUP_BYTES_MAX = 249
TASK_BYTES = 256 * 2**20
"""Default size of a task: a second's work. With half of it, reading takes an eighth longer."""

ALIASES = {
    "maxrecordspertrigger": "maxOffsetsPerTrigger",
    "minrecordspertrigger": "minOffsetsPerTrigger",
    "kafka.group.id": "groupId",
}
NAMES = (
    "path", "url", "identity", "serverFingerprint", "requestTimeoutMs",
    "subscribe", "subscribePattern", "assign",
    "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy",
    "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp",
    "maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay",
    "minPartitions", "maxRecordsPerPartition", "targetPartitionBytes",
    "failOnDataLoss", "includeHeaders", "groupId",
)  # fmt: skip
_BATCH_ONLY = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
_STREAM_ONLY = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "groupId")
_URL_ONLY = ("identity", "serverFingerprint", "requestTimeoutMs", "groupId")


class Place(msgspec.Struct, frozen=True):
    """Where the bytes are: a data folder, or a server and how to speak to it. Holds no secret."""

    path: str = ""
    address: str = ""
    identity: str = ""
    fingerprint: str = ""
    timeout_seconds: float = 0.0


class Topics(msgspec.Struct, frozen=True):
    """Which topics are read: exactly one of the three is given."""

    names: tuple[str, ...] = ()
    pattern: str = ""
    assigned: dict[str, tuple[int, ...]] = {}


class Edge(msgspec.Struct, frozen=True):
    """Where reading begins or ends: at an offset, or at a time in milliseconds; for all partitions or for each.

    `offset` and `timestamp` are for partitions that have none of their own.
    """

    offset: int | None = None
    timestamp: int | None = None
    offsets: Offsets = {}
    timestamps: Offsets = {}
    option: str = ""
    """Name of the option that set this edge, for messages."""


class SourceOptions(msgspec.Struct, frozen=True):
    """The checked options of a query."""

    place: Place
    topics: Topics
    start: Edge
    end: Edge
    latest_if_no_time: bool
    records_per_trigger_max: int | None
    bytes_per_trigger_max: int | None
    records_per_trigger_min: int | None
    trigger_delay_seconds: float
    tasks_min: int | None
    records_per_task_max: int | None
    task_bytes: int
    fail_on_data_loss: bool
    include_headers: bool
    group: str = ""
    """Name of the group under which a stream reports its progress to the server; empty: no reports."""


def parse(given: Mapping[str, str], query: Literal["batch", "stream", "any"] = "any") -> SourceOptions:
    """Check the options of a query and return their meaning; `any`: the kind of query is not known yet.

    Raises:
        OptionError: an option is unknown, missing, wrong, or does not go with another option.
    """
    options = normalise(given, NAMES, SERVER_ALIASES | ALIASES, "the source")
    for name in _STREAM_ONLY if query == "batch" else _BATCH_ONLY if query == "stream" else ():
        if name in options:
            other = "streams: it has no meaning in spark.read" if query == "batch" else "batches: a stream has no end"
            raise OptionError(f"option {name} is for {other}")
    if "maxOffsetsPerTrigger" in options and "maxBytesPerTrigger" in options:
        raise OptionError("options maxOffsetsPerTrigger and maxBytesPerTrigger do not go together: give one")
    if "maxTriggerDelay" in options and "minOffsetsPerTrigger" not in options:
        raise OptionError("option maxTriggerDelay needs minOffsetsPerTrigger: it says how long to wait for so many")
    most, least = read_count(options, "maxOffsetsPerTrigger"), read_count(options, "minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        raise OptionError(f"option minOffsetsPerTrigger: {least} is more than maxOffsetsPerTrigger, {most}")
    topics = _topics(options)
    start = _edge(options, "starting", LATEST if query == "stream" else EARLIEST, topics)
    end = _edge(options, "ending", LATEST, topics)
    if query == "batch":
        _check_range(start, end)
    strategy = read_choice(options, "startingOffsetsByTimestampStrategy", ("error", "latest"), "error")
    return SourceOptions(
        place=read_place(options),
        topics=topics,
        start=start,
        end=end,
        latest_if_no_time=strategy == "latest",
        records_per_trigger_max=most,
        bytes_per_trigger_max=read_bytes(options, "maxBytesPerTrigger"),
        records_per_trigger_min=least,
        trigger_delay_seconds=read_duration(options, "maxTriggerDelay", "15m"),
        tasks_min=read_count(options, "minPartitions"),
        records_per_task_max=read_count(options, "maxRecordsPerPartition"),
        task_bytes=read_bytes(options, "targetPartitionBytes") or TASK_BYTES,
        fail_on_data_loss=read_flag(options, "failOnDataLoss", default=True),
        include_headers=read_flag(options, "includeHeaders", default=False),
        group=_group(options),
    )


# -- where ------------------------------------------------------------------------------------------------------------


def read_place(options: Mapping[str, str]) -> Place:
    """Return where the records are.

    Raises:
        OptionError: neither or both of path and url are given, or their value is wrong.
    """
    path, url = options.get("path"), options.get("url")
    if path is not None and url is not None:
        raise OptionError("options path and url do not go together: give the data folder or the server")
    if path is not None:
        for name in _URL_ONLY:
            if name in options:
                raise OptionError(f"option {name} goes with url; a data folder is read without a server")
        if not os.path.isdir(path):
            raise OptionError(f"option path: {path!r} is no folder here; give the server's data folder")
        if not os.path.isdir(os.path.join(path, "topics")):
            raise OptionError(f"option path: {path!r} is no data folder of a server: it has no folder 'topics'")
        return Place(path=os.path.abspath(path))
    if url is None:
        url = os.environ.get(SERVER_VARIABLE)
    if not url:
        raise OptionError("option path (a data folder) or url (jebp://host:port) is missing: say where the records are")
    match = re.fullmatch(r"(?:jebp://)?(\[[0-9a-fA-F:.]+\]|[^\s:/,]+):(\d{1,5})/?", url.strip(), re.ASCII)
    if match is None or not 0 < int(match[2]) < 65536:
        raise wrong_value("url", url, "jebp://host:port, of one server")
    identity = options.get("identity") or os.environ.get(IDENTITY_VARIABLE)
    if not identity:
        raise OptionError(
            "option identity is missing: the path of the key file to connect with,"
            " as conf/admin_key in the server's data folder"
        )
    if os.path.exists(identity):  # tasks may run in another folder
        identity = os.path.abspath(identity)
    fingerprint = (options.get("serverFingerprint") or os.environ.get(FINGERPRINT_VARIABLE) or "").lower()
    if fingerprint and not re.fullmatch("[0-9a-f]{64}", fingerprint, re.ASCII):
        raise wrong_value("serverFingerprint", fingerprint, "64 hex digits ('babelbus clients list' prints them)")
    timeout_ms = read_count(options, "requestTimeoutMs") or 120_000
    return Place(
        address=f"{match[1]}:{match[2]}", identity=identity, fingerprint=fingerprint, timeout_seconds=timeout_ms / 1000
    )


# -- which topics -----------------------------------------------------------------------------------------------------


def _topics(options: Mapping[str, str]) -> Topics:
    given = [name for name in ("subscribe", "subscribePattern", "assign") if name in options]
    if len(given) != 1:
        what = f"{' and '.join(given)} were given" if given else "none was given"
        raise OptionError(
            f"exactly one of the options subscribe, subscribePattern and assign says what to read; {what}"
        )
    name, value = given[0], options[given[0]]
    if name == "subscribe":
        topics = tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
        if not topics:
            raise wrong_value(name, value, "one topic or several with commas between them")
        return Topics(names=topics)
    if name == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise wrong_value(name, value, f"a regular expression that fits whole topic names ({error})") from None
        if not value:
            raise wrong_value(name, value, "a regular expression that fits whole topic names")
        return Topics(pattern=value)
    wanted = 'JSON as {"topic": [0, 1]}'
    found = read_object(name, value, wanted)
    for partitions in found.values():
        if not isinstance(partitions, list) or not partitions or not all(_is_number(one) for one in partitions):
            raise wrong_value(name, value, wanted)
    return Topics(assigned={topic: tuple(sorted(set(numbers))) for topic, numbers in found.items()})


def _is_number(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= INT64_MAX


def _group(options: Mapping[str, str]) -> str:
    name = options.get("groupId", "")
    if "groupId" in options and not 0 < len(name.encode()) <= GROUP_BYTES_MAX:
        raise wrong_value("groupId", name, f"a name of 1 to {GROUP_BYTES_MAX} bytes")
    return name


# -- from where to where ----------------------------------------------------------------------------------------------


def _edge(options: Mapping[str, str], side: Literal["starting", "ending"], default: int, topics: Topics) -> Edge:
    """Read the options of one side; a time for all beats times for each, which beat offsets (as Kafka's source)."""
    for_all, for_each, offsets = f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets"
    # All that is given is checked, also what another one beats.
    by_offset = _offsets_edge(options, offsets, side, default, topics)
    by_each = None
    if for_each in options:
        by_each = Edge(timestamps=_each(options, for_each, 0, "milliseconds", topics), offset=default, option=for_each)
    timestamp = read_count(options, for_all, "milliseconds since the epoch", least=0)
    if timestamp is not None:
        return Edge(timestamp=timestamp, option=for_all)
    return by_each or by_offset


def _check_range(start: Edge, end: Edge) -> None:
    """Check that a batch can have records at all.

    Raises:
        OptionError: it begins at the end of all topics, or at a time after the one where it ends.
    """
    offsets = {offset for each in start.offsets.values() for offset in each.values()}
    if (offsets == {LATEST} if offsets else start.offset == LATEST) and not start.timestamps:
        raise OptionError(
            f"option {start.option}: a batch that begins at the latest offset has no records; write earliest,"
            " an offset or a time, or read a stream"
        )
    if start.timestamp is not None and end.timestamp is not None and start.timestamp > end.timestamp:
        raise OptionError(f"option {start.option}: {start.timestamp} is after {end.option}, {end.timestamp}")


def _offsets_edge(options: Mapping[str, str], name: str, side: str, default: int, topics: Topics) -> Edge:
    words = {"latest": LATEST} | ({"earliest": EARLIEST} if side == "starting" else {})
    value = options.get(name)
    if value is None:
        return Edge(offset=default)
    if value.strip().lower() in words:
        return Edge(offset=words[value.strip().lower()], option=name)
    least = EARLIEST if side == "starting" else LATEST
    if not value.lstrip().startswith("{"):
        raise wrong_value(name, value, f"{', '.join(words)} or {_each_wanted(least)}")
    return Edge(offsets=_each(options, name, least, "offset", topics), offset=default, option=name)


def _each_wanted(least: int) -> str:
    notes = {EARLIEST: " (-2 is earliest, -1 latest)", LATEST: " (-1 is latest)"}
    return f'JSON as {{"topic": {{"0": 23}}}}{notes.get(least, "")}'


def _each(options: Mapping[str, str], name: str, least: int, what: str, topics: Topics) -> Offsets:
    value, wanted = options[name], f"{_each_wanted(least)}, a whole number ({what}) for each partition"
    found: Offsets = {}
    for topic, partitions in read_object(name, value, wanted).items():
        if not isinstance(partitions, dict):
            raise wrong_value(name, value, wanted)
        for partition, number in partitions.items():
            if not re.fullmatch(r"\d{1,9}", partition, re.ASCII) or not _is_number(number, least):
                raise wrong_value(name, value, wanted)
            if int(partition) in found.get(topic, {}):  # as "0" and "00"
                raise named_twice(name, value, f"partition {int(partition)} of topic {topic!r}")
            found.setdefault(topic, {})[int(partition)] = number
        subscribed = topic in topics.names or topic in topics.assigned or bool(topics.pattern)
        if not subscribed:
            raise OptionError(f"option {name}: topic {topic!r} is not among those that are read")
    return found
