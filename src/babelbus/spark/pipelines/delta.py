"""A Delta table, each batch once, through the package `deltalake`, which needs no jar.

A batch passes through the driver: up to about 1 GB. The table notes the id of the query and the number of the batch
with the rows themselves, so that a batch that is done again is known.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from babelbus.spark.errors import SparkError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class DeltaMissingError(SparkError):
    """The package `deltalake` is not installed."""


def need_delta() -> None:
    """Check that the package is installed.

    Raises:
        DeltaMissingError: the package is not installed.
    """
    if importlib.util.find_spec("deltalake") is None:
        raise DeltaMissingError("a sink delta needs the package deltalake: pip install deltalake")


class DeltaFolder:
    """Appends one batch after the other to a table, which the first one makes."""

    def __init__(self, path: str, partition_by: list[str], transaction: str, options: dict[str, str]) -> None:
        self._path = path
        self._partition_by = partition_by
        self._transaction = transaction
        self._options = options

    def __call__(self, frame: "DataFrame", batch: int) -> None:
        """Append a batch, unless the table has it."""
        delta = importlib.import_module("deltalake")  # by name: it is no requirement of ours, so types are not there
        if delta.DeltaTable.is_deltatable(self._path, self._options or None):
            last = delta.DeltaTable(self._path, storage_options=self._options or None).transaction_version(
                self._transaction
            )
            if last is not None and last >= batch:
                return
        delta.write_deltalake(
            self._path,
            frame.toArrow(),
            mode="append",
            partition_by=self._partition_by or None,
            storage_options=self._options or None,
            commit_properties=delta.CommitProperties(app_transactions=[delta.Transaction(self._transaction, batch)]),
        )
