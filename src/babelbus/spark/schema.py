"""The columns that the source has and those that the sink takes, and checks of the columns of a query."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from babelbus.spark.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow as pa

    from babelbus.spark.sink_options import SinkOptions

HEADERS_TYPE = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
COLUMNS: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "subject": StringType(),
    "headers": HEADERS_TYPE,
}
NULLABLE = frozenset({"key", "value", "headers"})
"""Which columns can be null. Spark looks before each value of these, and reads the others a twentieth faster."""
_TEXT = (StringType(), BinaryType())
SINK_COLUMNS: dict[str, tuple[DataType, ...]] = {
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


def full_schema(*, include_headers: bool) -> StructType:
    """Return the columns of a query that names none.

    Spark reads all of these even to count rows, so what says nothing is left out: `timestampType`, which Kafka jobs
    may ask for by `.schema(...)`, is always 0, and would cost a twentieth of the speed.
    """
    left_out = {"timestampType"} if include_headers else {"timestampType", "headers"}
    return StructType(
        [StructField(name, kind, name in NULLABLE) for name, kind in COLUMNS.items() if name not in left_out]
    )


def check_schema(
    schema: StructType,
    columns: Mapping[str, DataType] = COLUMNS,
    nullable: Collection[str] = NULLABLE,
    who: str = "the source",
) -> None:
    """Check that a query asks only for columns that there are: any of them in any order.

    Raises:
        SchemaError: a column is unknown or of another type.
    """
    for field in schema.fields:
        kind = columns.get(field.name)
        if kind is None:
            raise SchemaError(f"there is no column {field.name!r}; {who} has {', '.join(columns)}")
        if field.name in nullable and not field.nullable:
            raise SchemaError(f"column {field.name!r} can be null: leave NOT NULL out")
        if field.dataType != kind:
            raise SchemaError(
                f"column {field.name!r} is {kind.simpleString()}, not {field.dataType.simpleString()}: cast it later"
            )


def arrow_schema(schema: StructType) -> "pa.Schema":
    """Return the Arrow types that Spark expects for a schema, to the letter."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def check_columns(schema: StructType, options: "SinkOptions") -> None:
    """Check that the rows can be written.

    Raises:
        SchemaError: a column is missing, unknown or of another type.
    """
    columns = STATE_COLUMNS if options.to_state else SINK_COLUMNS
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
