"""The columns that the sink takes."""

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from babelbus.spark.errors import SchemaError
from babelbus.spark.schema import HEADERS_TYPE
from babelbus.spark.sink_options import SinkOptions

_TEXT = (StringType(), BinaryType())
COLUMNS: dict[str, tuple[DataType, ...]] = {
    "value": _TEXT,
    "key": _TEXT,
    "headers": (HEADERS_TYPE,),
    "topic": (StringType(),),
    "partition": (IntegerType(),),
    "timestamp": (TimestampType(),),
    "subject": (StringType(),),
}
LEFT_OUT: dict[str, DataType] = {"offset": LongType(), "timestampType": IntegerType()}
"""Columns of the source that a record cannot be given: a copy of a topic need not drop them."""
STATE_COLUMNS: dict[str, tuple[DataType, ...]] = {"key": _TEXT, "value": _TEXT, "timestamp": (TimestampType(),)}


def check_columns(schema: StructType, options: SinkOptions) -> None:
    """Check that the rows can be written.

    Raises:
        SchemaError: a column is missing, unknown or of another type.
    """
    columns = STATE_COLUMNS if options.to_state else COLUMNS
    what = "table=state" if options.to_state else "the sink"
    names = [field.name for field in schema.fields]
    for field in schema.fields:
        if LEFT_OUT.get(field.name) == field.dataType:
            continue
        kinds = columns.get(field.name)
        if kinds is None:
            raise SchemaError(
                f"column {field.name!r}: {what} has {', '.join(columns)}; leave the others out, as with .drop(...)"
            )
        if names.count(field.name) > 1:
            raise SchemaError(f"column {field.name!r} is there twice")
        if _bare(field.dataType) not in [_bare(kind) for kind in kinds]:
            wanted = " or ".join(kind.simpleString() for kind in kinds)
            given = field.dataType.simpleString()
            raise SchemaError(f"column {field.name!r} is {given}, {what} takes {wanted}: cast it first")
    for name in ("key", "value") if options.to_state else ("value",):
        if name not in names:
            raise SchemaError(f"column {name!r} is missing: {what} needs it")
    if not options.topic and "topic" not in names:
        raise SchemaError("there is neither a column 'topic' nor the option topic: say where the rows go")


def _bare(kind: DataType) -> str:
    """Return a type without what does not matter here: nullability, and how strings compare."""
    if isinstance(kind, StringType):
        return "string"
    if isinstance(kind, ArrayType):
        return f"array<{_bare(kind.elementType)}>"
    if isinstance(kind, StructType):
        return f"struct<{','.join(f'{field.name}:{_bare(field.dataType)}' for field in kind.fields)}>"
    return kind.simpleString()
