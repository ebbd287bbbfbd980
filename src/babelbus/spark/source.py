"""The data source `babelbus` as Spark sees it."""

from typing import TYPE_CHECKING, Literal

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from babelbus.spark.options import parse
from babelbus.spark.schema import check_columns, check_schema, full_schema
from babelbus.spark.state_options import is_state, parse_state

if TYPE_CHECKING:
    from babelbus.spark.sink_options import SinkOptions


class BabelbusDataSource(DataSource):
    """`spark.read.format("babelbus")` and `spark.readStream.format("babelbus")`; options in docs/pipeline.md."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "babelbus"

    def schema(self) -> StructType:
        """Return the columns of a query that names none.

        Raises:
            OptionError: an option is wrong.
        """
        if is_state(self.options):
            from babelbus.spark.state_table import state_schema

            parse_state(self.options)
            return state_schema()
        return full_schema(include_headers=parse(self.options).include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch.

        Raises:
            OptionError, SchemaError: an option or a column is wrong.
        """
        from babelbus.spark.reader import BatchReader

        if is_state(self.options):
            from babelbus.spark.state_table import StateReader, check_state_schema

            check_state_schema(schema)
            return StateReader(parse_state(self.options, "batch"), schema)
        check_schema(schema)
        return BatchReader(parse(self.options, "batch"), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a stream.

        Raises:
            OptionError, SchemaError: an option or a column is wrong.
        """
        from babelbus.spark.stream import StreamReader

        if is_state(self.options):
            from babelbus.spark.state_table import StateStreamReader, check_state_schema

            check_state_schema(schema)
            return StateStreamReader(parse_state(self.options, "stream").source, schema)
        check_schema(schema)
        return StreamReader(parse(self.options, "stream"), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a save.

        Raises:
            OptionError, SchemaError, OutputModeError: an option, a column or the mode is wrong.
        """
        from babelbus.spark.sink import BatchWriter

        return BatchWriter(self._sink_options("batch", schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 - as above
        """Return the writer of a stream.

        Raises:
            OptionError, SchemaError, OutputModeError: an option, a column or the mode is wrong.
        """
        from babelbus.spark.sink import StreamWriter

        return StreamWriter(self._sink_options("stream", schema, overwrite=overwrite))

    def _sink_options(self, kind: Literal["batch", "stream"], schema: StructType, *, overwrite: bool) -> "SinkOptions":
        from babelbus.spark.sink_options import check_mode, parse_sink

        options = parse_sink(self.options, kind)
        check_mode(options, kind, overwrite=overwrite)
        check_columns(schema, options)
        return options
