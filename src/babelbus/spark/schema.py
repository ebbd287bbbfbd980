"""The columns that the source has, and those that a query asked for."""

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


def full_schema(*, include_headers: bool) -> StructType:
    """Return the columns of a query that names none.

    Spark reads all of these even to count rows, so what says nothing is left out: `timestampType`, which Kafka jobs
    may ask for by `.schema(...)`, is always 0, and would cost a twentieth of the speed.
    """
    left_out = {"timestampType"} if include_headers else {"timestampType", "headers"}
    return StructType(
        [StructField(name, kind, name in NULLABLE) for name, kind in COLUMNS.items() if name not in left_out]
    )


def check_schema(schema: StructType) -> None:
    """Check that a query asks only for columns that there are: any of them in any order.

    Raises:
        SchemaError: a column is unknown or of another type.
    """
    for field in schema.fields:
        kind = COLUMNS.get(field.name)
        if kind is None:
            raise SchemaError(f"there is no column {field.name!r}; the source has {', '.join(COLUMNS)}")
        if field.name in NULLABLE and not field.nullable:
            raise SchemaError(f"column {field.name!r} can be null: leave NOT NULL out")
        if field.dataType != kind:
            raise SchemaError(
                f"column {field.name!r} is {kind.simpleString()}, not {field.dataType.simpleString()}: cast it later"
            )


def arrow_schema(schema: StructType) -> "pa.Schema":
    """Return the Arrow types that Spark expects for a schema, to the letter."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")
