"""Settings of any shape: read from a TOML file, the environment and flags, checked, described and written as TOML.

The modules beside this one declare the settings. Every error names the key and the source of its value, because the
reader of the message has three places to search.
"""

import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from babelbus.errors import ConfigError
from babelbus.units import UnitError, format_duration, format_size, parse_duration, parse_size

FILE_NAME = "babelbus.toml"
PREFIX = "BABELBUS_"
FILE_VARIABLE = "BABELBUS_CONFIG"

S = TypeVar("S", bound=msgspec.Struct)


class Setting(msgspec.Struct, frozen=True):
    """One setting, as documentation shows it. `unit` is empty without a unit; `doc` is meaning and reason."""

    key: str
    type: str
    default: str
    unit: str
    doc: str


class Value(NamedTuple):
    """The value of a key, and its source. `is_text` if the source has text only (environment, flags)."""

    raw: object
    source: str
    is_text: bool


class Field(NamedTuple):
    """One field of a struct of settings. `base` is its type without range and None."""

    name: str
    type: Any
    base: Any
    default: object
    is_optional: bool
    unit: str
    doc: str


def of(
    doc: str, unit: str = "", *, ge: float | None = None, gt: float | None = None, le: float | None = None
) -> msgspec.Meta:
    """Return the description of a setting: `Annotated[int, of("what it is for", "bytes", ge=1)]`."""
    extra = {"unit": unit}
    if gt is not None:
        return msgspec.Meta(description=doc, extra=extra, gt=gt, le=le)
    return msgspec.Meta(description=doc, extra=extra, ge=ge, le=le)


def fields_of(section: type[msgspec.Struct]) -> dict[str, Field]:
    """Return the settings of one section by name, in order."""
    return {field.name: _field(field) for field in msgspec.structs.fields(section)}


def collect(
    config: type[msgspec.Struct], path: str | None, environment: Mapping[str, str], flags: Mapping[str, object]
) -> dict[str, Value]:
    """Return the value of each dotted key in file, environment and flags; the later source wins.

    Raises:
        ConfigError: the file is missing or no TOML, or a key is unknown.
    """
    keys = {f"{section}.{name}" for section, type_ in _sections(config) for name in fields_of(type_)}
    values = dict(_from_file(path or environment.get(FILE_VARIABLE), keys))
    values.update(_from_environment(environment, keys))
    for key, raw in flags.items():
        _require_known(key, keys, "the command line")
        if raw is not None:
            values[key] = Value(raw, "the command line", isinstance(raw, str))
    return values


def build(config: type[S], values: Mapping[str, Value]) -> S:
    """Build the configuration of `values`, with the default for every other key.

    Raises:
        ConfigError: a value has the wrong type or is out of its range.
    """
    sections: dict[str, msgspec.Struct] = {}
    for section, type_ in _sections(config):
        fields = {
            name: _read(f"{section}.{name}", field, values[f"{section}.{name}"])
            for name, field in fields_of(type_).items()
            if f"{section}.{name}" in values
        }
        sections[section] = type_(**fields)
    return config(**sections)


def read(section: type[msgspec.Struct], changes: Mapping[str, object], *, source: str) -> dict[str, object]:
    """Check values of fields of one section, by name, and return them with text like "7d" converted.

    Raises:
        ConfigError: a key is unknown or a value wrong; the message names key and `source`.
    """
    fields = fields_of(section)
    for name in changes:
        _require_known(name, set(fields), source)
    return {name: _read(name, fields[name], Value(raw, source, False)) for name, raw in changes.items()}


def describe(config: type[msgspec.Struct]) -> list[Setting]:
    """Return every setting in order."""
    return [
        Setting(
            f"{section}.{name}",
            _type_text(field),
            _value_text(field.default, field.unit),
            field.unit,
            field.doc,
        )
        for section, type_ in _sections(config)
        for name, field in fields_of(type_).items()
    ]


def render(config: msgspec.Struct, *, comments: bool = False) -> str:
    """Return `config` as TOML that `collect` reads back to the same; with `comments`, the meaning above each key."""
    lines: list[str] = []
    for section, type_ in _sections(type(config)):
        lines += ["", f"[{section}]"]
        for name, field in fields_of(type_).items():
            value = getattr(getattr(config, section), name)
            if comments:
                lines.append(f"# {field.doc}" + (f" ({field.unit})" if field.unit else ""))
            # TOML has no null, so an unset setting is the word none. JSON's text is TOML's except for DEL.
            written = _value_text(value, field.unit) if value is None or _is_exact(value, field.unit) else value
            lines.append(f"{name} = {json.dumps(written)}".replace("\x7f", "\\u007f"))
    return "\n".join(lines[1:]) + "\n"


def variable_of(key: str) -> str:
    """Return the environment variable of a dotted key: `jebp.port` is BABELBUS_JEBP_PORT."""
    return PREFIX + key.upper().replace(".", "_")


def _from_file(path: str | None, keys: set[str]) -> Iterator[tuple[str, Value]]:
    if path is None:
        if not os.path.exists(FILE_NAME):
            return
        path = FILE_NAME
    import tomllib

    try:
        with open(path, "rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    for section, table in document.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{section} in {path} is outside of any section; write it below a [section] line")
        for name, raw in table.items():
            key = f"{section}.{name}"
            _require_known(key, keys, path)
            yield key, Value(raw, path, False)


def _from_environment(environment: Mapping[str, str], keys: set[str]) -> Iterator[tuple[str, Value]]:
    by_variable = {variable_of(key): key for key in keys}
    sections = {key.partition(".")[0].upper() for key in keys}
    for variable, raw in environment.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE:
            continue
        if variable in by_variable:
            yield by_variable[variable], Value(raw, f"the environment variable {variable}", True)
            continue
        # Kubernetes puts BABELBUS_PORT_5320_TCP and its like beside a service of our name, so an unknown variable is
        # a mistake only if it is in a section of ours, or a near miss.
        near = difflib.get_close_matches(variable, by_variable, n=1, cutoff=0.9)
        if near or variable.removeprefix(PREFIX).partition("_")[0] in sections:
            hint = near or difflib.get_close_matches(variable, by_variable, n=1)
            raise ConfigError(
                f"the environment variable {variable} is no setting" + (f"; did you mean {hint[0]}?" if hint else "")
            )


def _require_known(key: str, keys: set[str], source: str) -> None:
    if key in keys:
        return
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    raise ConfigError(f"{key} (from {source}) is no setting" + (f"; did you mean {near[0]}?" if near else ""))


def _read(key: str, field: Field, value: Value) -> object:
    """Convert a written value to the field's type, and check its range."""
    raw = value.raw
    try:
        if isinstance(raw, str) and field.is_optional and raw.strip().lower() == "none":
            raw = None
        elif isinstance(raw, str) and field.unit == "bytes":
            raw = parse_size(raw)
        elif isinstance(raw, str) and field.unit == "seconds":
            seconds = parse_duration(raw)
            raw = int(seconds) if field.base is int and seconds.is_integer() else seconds
        elif isinstance(raw, str) and value.is_text:
            raw = raw.strip()
        # A shell has text only, so "true" and "5320" are converted; in a file `port = "5320"` is a mistake.
        result = msgspec.convert(raw, field.type, strict=not value.is_text)
        if isinstance(result, float) and not math.isfinite(result):
            raise UnitError("it must be a finite number")
    except (msgspec.ValidationError, UnitError) as error:
        raise ConfigError(
            f"{key} = {value.raw!r} (from {value.source}): {error}; expected {_type_text(field)}"
        ) from error
    return result


def _sections(config: type[msgspec.Struct]) -> list[tuple[str, type[msgspec.Struct]]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(config)]


def _field(info: msgspec.structs.FieldInfo) -> Field:
    is_optional = type(None) in get_args(info.type)
    annotated = get_args(info.type)[0] if is_optional else info.type  # Annotated[T, of(...)] | None
    base, meta = get_args(annotated)
    assert isinstance(meta, msgspec.Meta), f"{info.name} is declared without of(...)"
    assert meta.extra is not None
    assert meta.description is not None
    return Field(info.name, info.type, base, info.default, is_optional, meta.extra["unit"], meta.description)


def _type_text(field: Field) -> str:
    if get_origin(field.base) is Literal:
        return " or ".join(get_args(field.base))
    names = {int: "integer", float: "number", bool: "true or false", str: "text"}
    text = {"bytes": "size", "seconds": "duration"}.get(field.unit) or names[field.base]
    return text + (" or none" if field.is_optional else "")


def _is_exact(value: object, unit: str) -> bool:
    """Return whether the text of a size or duration is read back as the same number."""
    parse = {"bytes": parse_size, "seconds": parse_duration}.get(unit)
    return parse is not None and parse(_value_text(value, unit)) == value


def _value_text(value: object, unit: str) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if unit == "bytes" and isinstance(value, int):
        return format_size(value)
    if unit == "seconds" and isinstance(value, float | int):
        return format_duration(value)
    return str(value)
