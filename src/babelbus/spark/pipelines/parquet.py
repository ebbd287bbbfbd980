"""A folder of Parquet in which every reader finds each row once, and small files are merged.

Spark's own file sink is exactly once for Spark alone: it keeps a list of the files that count, and a reader that does
not know it also reads what an interrupted batch left. Its files cannot be merged either. So here each batch is written
aside and moved into place under a name that has its number; a batch that is done again first takes away what it had
moved. Files are merged once their batch cannot come again. Needs a folder of a file system, which all executors share.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from babelbus.spark.errors import SparkError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ASIDE = "_batch"
"""Readers of Parquet ignore names that begin with `_` or `.`."""
MERGED = "_merged.parquet"
JOURNAL = "_merge.json"
ROWS_PER_GROUP = 100_000
_FILE = re.compile(r"batch-(\d{10})(?:-to-(\d{10}))?-\d{5}\.parquet")


class DamagedArchiveError(SparkError):
    """The journal of an interrupted merge cannot be read."""


class ParquetFolder:
    """Writes one batch after the other; used by one query. `files_max` of one folder are merged to one."""

    def __init__(self, folder: str, partition_by: list[str], files_max: int) -> None:
        self._folder = folder
        self._partition_by = partition_by
        self._files_max = files_max
        self._begun = False

    def __call__(self, frame: "DataFrame", batch: int) -> None:
        """Write a batch, and merge what earlier ones wrote. May be called again with the same batch."""
        if not self._begun:
            self._begin(batch)
        # Spark's own default has no meaning outside of Spark, and a merge could not keep it.
        frame.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        aside = os.path.join(self._folder, ASIDE)
        frame.write.partitionBy(*self._partition_by).mode("overwrite").parquet(aside)
        touched: dict[str, int] = {}
        for path in sorted(_data_files(aside)):
            inside = os.path.relpath(os.path.dirname(path), aside)
            folder = os.path.normpath(os.path.join(self._folder, inside))
            number = touched[folder] = touched.get(folder, -1) + 1
            os.makedirs(folder, exist_ok=True)
            os.replace(path, os.path.join(folder, f"batch-{batch:010d}-{number:05d}.parquet"))
        shutil.rmtree(aside)
        for folder in touched:
            merge(folder, batch, self._files_max)

    def _begin(self, batch: int) -> None:
        """Continue interrupted merges, and drop the files of a killed attempt at this batch, the first one of a run."""
        self._folder = os.path.abspath(self._folder)  # here, which may be on a Connect server
        for folder, _, names in os.walk(self._folder):
            if os.path.basename(folder).startswith(ASIDE):
                continue
            if JOURNAL in names or MERGED in names:
                finish_merge(folder)
            for name in names:
                match = _FILE.fullmatch(name)
                if match is not None and int(match[1]) == batch:
                    os.unlink(os.path.join(folder, name))
        self._begun = True


def merge(folder: str, batch: int, files_max: int) -> bool:
    """Replace files of one folder by one file, if `files_max` of batches before `batch` are there; return whether.

    Merged files are left alone until `files_max` of such files are there too, so that a row is rewritten a few
    times and not with every merge. Rows keep their order. A reader that has listed the folder before may find a file
    gone, and has to list it again; for a moment the rows of the merged files are missing, never twice.
    """
    import pyarrow.parquet as pq

    old = _mergeable(folder, batch, files_max)
    if len(old) < files_max:
        return False
    first, last = _FILE.fullmatch(old[0]), _FILE.fullmatch(old[-1])
    assert first is not None
    assert last is not None
    new = f"batch-{first[1]}-to-{last[2] or last[1]}-00000.parquet"
    merged = os.path.join(folder, MERGED)
    writer: pq.ParquetWriter | None = None
    for name in old:
        with pq.ParquetFile(os.path.join(folder, name)) as file:
            if writer is None:
                writer = pq.ParquetWriter(merged, file.schema_arrow, compression="zstd")
            for rows in file.iter_batches(ROWS_PER_GROUP):
                writer.write_batch(rows, row_group_size=ROWS_PER_GROUP)
    assert writer is not None
    writer.close()
    _flush(merged)
    journal = os.path.join(folder, JOURNAL)
    with open(journal + ".new", "w", encoding="utf-8") as file:
        json.dump({"new": new, "old": old}, file)
    _flush(journal + ".new")
    os.replace(journal + ".new", journal)
    _flush(folder)
    finish_merge(folder)
    return True


def finish_merge(folder: str) -> None:
    """Replace files by the file that they were merged into, or drop that file if it was not complete yet.

    Raises:
        DamagedArchiveError: the journal cannot be read.
    """
    journal, merged = os.path.join(folder, JOURNAL), os.path.join(folder, MERGED)
    if not os.path.exists(journal):
        if os.path.exists(merged):
            os.unlink(merged)
        return
    try:
        with open(journal, encoding="utf-8") as file:
            told = json.load(file)
        new, old = told["new"], told["old"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedArchiveError(f"{journal} is damaged ({error}): compare the files of the folder by hand") from error
    for name in old:
        if os.path.exists(os.path.join(folder, name)):
            os.unlink(os.path.join(folder, name))
    if os.path.exists(merged):
        os.replace(merged, os.path.join(folder, new))
    _flush(folder)
    os.unlink(journal)


def _mergeable(folder: str, batch: int, files_max: int) -> list[str]:
    """Return the files to merge, in the order of their batches: the small ones, or all when many were merged before."""
    found = []
    for name in os.listdir(folder):
        match = _FILE.fullmatch(name)
        if match is not None and int(match[2] or match[1]) < batch:
            found.append((int(match[1]), name, match[2] is not None))
    found.sort()
    if sum(merged for _, _, merged in found) >= files_max:
        return [name for _, name, _ in found]
    return [name for _, name, merged in found if not merged]


def _data_files(folder: str) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".parquet") and not name.startswith((".", "_")):
                yield os.path.join(parent, name)


def _flush(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
