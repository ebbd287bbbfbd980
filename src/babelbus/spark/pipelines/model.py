"""The parts of a pipeline: the fields of its file, and which of them go together (docs/pipeline.md, "The file").

One shape for both forms: a YAML file, and the dictionary `pipeline` of a Python file.
"""

import json
import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from babelbus.units import UnitError, parse_duration

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
PIPELINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)

Mode = Literal["append", "update", "complete"]
Scalar = str | int | float | bool


class Wrong(Exception):  # noqa: N818 - never leaves this package: `load` adds the file and makes a PipelineError of it
    """A field is wrong: its path in the file, and what is the matter."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem


class Watermark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lateness of events: a window is final once an event `delay` later than its end was seen."""

    delay: str
    column: str = "timestamp"


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where rows come from: exactly one of `topic`, `pattern`, `state`, `parquet` and `format`."""

    topic: str | list[str] | None = None
    pattern: str | None = None
    state: bool = False
    parquet: str | None = None
    format: str | None = None
    schema: str | None = None
    """The columns of `parquet` and `format`, as DDL; of `parquet`, those of the files there are if not given."""
    json: str | None = None
    """The fields of the JSON in `value`, as DDL: they come as the column `data`."""
    stream: bool = True
    watermark: Watermark | None = None
    options: dict[str, Scalar] = {}

    @property
    def is_bus(self) -> bool:
        """Return whether it is read from the bus."""
        return self.topic is not None or self.pattern is not None or self.state


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frame made of those above it: `sql`, or `python` as `file.py:function` or `package.module:function`."""

    sql: str | None = None
    python: str | None = None


class Sink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"input": "from"}):
    """Where rows go: exactly one of `topic`, `state`, `parquet`, `delta`, `console` and `format`."""

    input: str
    topic: str | bool | None = None
    """The topic's name, or `true`: the column `topic` names it, row by row."""
    state: str | None = None
    """The topic with `retain = "last"` through which the state is set."""
    parquet: str | None = None
    delta: str | None = None
    console: bool = False
    format: str | None = None
    key: str | None = None
    value: str | None = None
    subject: str | None = None
    partition: str | None = None
    """SQL expressions for these columns of a record, over the columns of the frame."""
    mode: Mode = "append"
    trigger: str | None = None
    partition_by: list[str] = []
    compact_files: int | None = None
    dead_letters: str | None = None
    options: dict[str, Scalar] = {}


class Pipeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole pipeline; names of sources, steps and parameters are one space."""

    name: str
    sources: dict[str, Source]
    sinks: dict[str, Sink]
    steps: dict[str, Step] = {}
    description: str = ""
    parameters: dict[str, Scalar] = {}
    trigger: str = "1s"
    spark: dict[str, Scalar] = {}
    """Settings of the Spark session, as `spark.sql.shuffle.partitions`."""


SOURCE_KINDS = ("topic", "pattern", "state", "parquet", "format")
SINK_KINDS = ("topic", "state", "parquet", "delta", "console", "format")
_PARTS: dict[str, type[msgspec.Struct]] = {"sources": Source, "steps": Step, "sinks": Sink}


def read(given: Any) -> Pipeline:
    """Check the fields of a pipeline and return it.

    Raises:
        Wrong: a field is missing, unknown, of the wrong type, or does not go with another.
    """
    if not isinstance(given, dict):
        raise Wrong("", "a pipeline is a mapping with name, sources, steps and sinks")
    parts: dict[str, Any] = dict(given)
    for part, kind in _PARTS.items():
        if part in parts:
            parts[part] = _entries(parts[part], part, kind)
    check_scalars("spark", parts.get("spark"))
    pipeline = _convert(parts, Pipeline, "")
    assert isinstance(pipeline, Pipeline)
    if not PIPELINE_NAME.fullmatch(pipeline.name):
        raise Wrong("name", f"{pipeline.name!r} is no name: letters, digits, '_', '-' and '.'")
    _check_names(pipeline)
    for name, source in pipeline.sources.items():
        _check_source(f"sources.{name}", source)
    for name, step in pipeline.steps.items():
        if (step.sql is None) == (step.python is None):
            raise Wrong(f"steps.{name}", "give exactly one of sql and python")
    if not pipeline.sinks:
        raise Wrong("sinks", "a pipeline has at least one")
    for name, sink in pipeline.sinks.items():
        _check_sink(f"sinks.{name}", sink)
    read_trigger("trigger", pipeline.trigger)
    return pipeline


def fill(value: Any, parameters: dict[str, Scalar], field: str = "") -> Any:
    """Replace `${name}` by the parameter in all texts of a file's fields; `$$` means a `$`.

    Raises:
        Wrong: there is no such parameter.
    """
    if isinstance(value, dict):
        return {name: fill(one, parameters, f"{field}.{name}" if field else str(name)) for name, one in value.items()}
    if isinstance(value, list):
        return [fill(one, parameters, f"{field}[{number}]") for number, one in enumerate(value)]
    if not isinstance(value, str):
        return value

    whole = re.fullmatch(r"\$\{([^}]*)\}", value)
    if whole is not None and whole[1] in parameters:
        return parameters[whole[1]]  # a number stays one

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if match[1] not in parameters:
            known = ", ".join(parameters) or "none"
            raise Wrong(field, f"there is no parameter {match[1]!r}; there are: {known}")
        return str(parameters[match[1]])

    return re.sub(r"\$\$|\$\{([^}]*)\}", replace, value)


def read_trigger(field: str, text: str) -> float | None:
    """Return the seconds between two batches, 0 for at once, `None` for `once`: what there is now, then the end.

    Raises:
        Wrong: the text is neither a duration nor one of these words.
    """
    if text in ("once", "asap"):
        return None if text == "once" else 0.0
    try:
        return parse_duration(text)
    except UnitError as error:
        raise Wrong(field, f"{error}; or write asap or once") from None


def check_scalars(field: str, given: Any) -> None:
    """Check that the values of a mapping are texts, numbers, true or false.

    Raises:
        Wrong: a value is something else.
    """
    for name, value in given.items() if isinstance(given, dict) else ():
        if not isinstance(value, Scalar):
            raise Wrong(f"{field}.{name}", f"a text, a number, true or false is needed, not {value!r}")


def _entries(given: Any, part: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Wrong(part, f"a mapping of names to {part} is needed")
    found = {}
    for name, fields in given.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Wrong(part, f"{name!r} is no name: letters, digits and '_', a letter first")
        if isinstance(fields, dict):
            check_scalars(f"{part}.{name}.options", fields.get("options"))
        found[name] = _convert(fields, kind, f"{part}.{name}")
    return found


_AT = re.compile(r" - at `\$\.?(.*)`$")


def _convert(value: Any, kind: Any, field: str) -> Any:
    """Convert with msgspec, whose errors name the place below `value` in their own way."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        match = _AT.search(text)
        below = match[1] if match else ""
        problem = text[: match.start()] if match else text
        raise Wrong(".".join(part for part in (field, below) if part), problem[0].lower() + problem[1:]) from None


def _check_names(pipeline: Pipeline) -> None:
    seen: dict[str, str] = {"spark": "the session"}
    tables: dict[str, str] = {}
    for part in ("parameters", "sources", "steps"):
        for name in getattr(pipeline, part):
            field = f"{part}.{name}"
            if name in seen:
                raise Wrong(field, f"the name is taken by {seen[name]}")
            seen[name] = field
            if part != "parameters" and tables.setdefault(name.lower(), field) != field:
                raise Wrong(field, f"SQL takes it for {tables[name.lower()]}: capitals make no difference there")


def _one_of(field: str, given: msgspec.Struct, kinds: tuple[str, ...]) -> str:
    found = [name for name in kinds if getattr(given, name)]
    if len(found) != 1:
        what = f"{' and '.join(found)} were given" if found else "none was given"
        raise Wrong(field, f"exactly one of {', '.join(kinds)} says where; {what}")
    return found[0]


_SOURCE_OPTIONS: dict[str, tuple[str, ...]] = {
    "topic": ("subscribe", "subscribePattern", "table"),
    "pattern": ("subscribe", "subscribePattern", "assign", "table"),
    "state": ("subscribe", "subscribePattern", "assign", "table"),
}
_SINK_OPTIONS: dict[str, tuple[str, ...]] = {"topic": ("topic", "table"), "state": ("topic", "table")}
"""Options that say what the field of this name says already: one of the two would be passed over in silence."""


def _check_options(field: str, kind: str, options: dict[str, Scalar], taken: tuple[str, ...]) -> None:
    lower = {name.lower(): name for name in taken}
    seen: dict[str, str] = {}
    for name in options:
        if name.lower() in lower:
            raise Wrong(f"{field}.options.{name}", f"does not go with {kind}, which says it already")
        if name.lower() in seen:
            raise Wrong(f"{field}.options.{name}", f"is the same as {seen[name.lower()]}: give one")
        seen[name.lower()] = name


def _check_assigned(field: str, source: Source) -> None:
    """Check that partitions are assigned of the topics that are named, and of each of them."""
    name = next((name for name in source.options if name.lower() == "assign"), None)
    if source.topic is None or name is None:
        return
    try:
        assigned = json.loads(str(source.options[name]))
    except ValueError:
        return  # the source says what it should look like
    topics = {source.topic} if isinstance(source.topic, str) else set(source.topic)
    if isinstance(assigned, dict) and set(assigned) != topics:
        raise Wrong(
            f"{field}.options.{name}",
            f"is of {', '.join(sorted(assigned)) or 'no topic'}, and topic is {', '.join(sorted(topics))}",
        )


def _check_source(field: str, source: Source) -> None:
    kind = _one_of(field, source, SOURCE_KINDS)
    _check_options(field, kind, source.options, _SOURCE_OPTIONS.get(kind, ()))
    _check_assigned(field, source)
    if source.schema is not None and kind not in ("parquet", "format"):
        raise Wrong(f"{field}.schema", f"goes with parquet and format; a {kind} has its columns")
    if source.json is not None and kind in ("parquet", "format"):
        raise Wrong(f"{field}.json", "goes with topic, pattern and state")
    if source.watermark is not None and not source.stream:
        raise Wrong(f"{field}.watermark", "goes with streams")


_ONLY: dict[str, tuple[str, ...]] = {
    "key": ("topic", "state"),
    "value": ("topic", "state"),
    "subject": ("topic",),
    "partition": ("topic",),
    "dead_letters": ("topic", "state"),
    "partition_by": ("parquet", "delta", "format"),
    "compact_files": ("parquet",),
}


def _check_sink(field: str, sink: Sink) -> None:
    kind = _one_of(field, sink, SINK_KINDS)
    taken = (*_SINK_OPTIONS.get(kind, ()), *(("deadLetterTopic",) if sink.dead_letters else ()))
    _check_options(field, kind, sink.options, taken)
    for name, kinds in _ONLY.items():
        if getattr(sink, name) and kind not in kinds:
            raise Wrong(f"{field}.{name}", f"goes with {' and '.join(kinds)}, not with {kind}")
    if sink.compact_files is not None and sink.compact_files < 2:
        raise Wrong(f"{field}.compact_files", f"{sink.compact_files} is too few: from 2 files on there is one to save")
    if sink.mode != "append" and kind in ("parquet", "delta"):
        raise Wrong(f"{field}.mode", f"{kind} files take append only: what was written stays")
    if sink.mode == "update" and (sink.format or "").lower() == "babelbus":
        raise Wrong(
            f"{field}.mode", "update goes with topic and state, not with the format babelbus: name one of these"
        )
    if sink.trigger is not None:
        read_trigger(f"{field}.trigger", sink.trigger)


Function = Callable[..., Any]
"""`(spark, ...) -> DataFrame`: each further parameter is named as a source, a step or a parameter of the pipeline."""
