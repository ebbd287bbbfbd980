"""One Spark for the tests that need one: it takes seconds to start, and is left running until the last of them."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test
from pyspark.sql import SparkSession

from babelbus.spark.java import java_home
from babelbus.spark.python import worker_python
from tests.spark.support import Folder

FAST_CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run hypothesis' tests first: a thread of PySpark draws from the random numbers that hypothesis watches."""
    items.sort(key=lambda item: not is_hypothesis_test(getattr(item, "obj", None)))


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    os.environ["PYSPARK_PYTHON"] = worker_python()  # the workers run the `python3` of PATH otherwise
    os.environ["JAVA_HOME"] = java_home()
    with warnings.catch_warnings():
        # PySpark leaves the pipes and sockets to its gateway for the garbage collector to close.
        warnings.simplefilter("ignore", ResourceWarning)
        session = (
            SparkSession.builder.master("local[2]")
            .appName("babelbus tests")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", "1g")
            .config("spark.python.authenticate.socketTimeout", "120s")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.streaming.checkpointFileManagerClass", FAST_CHECKPOINTS)
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "data")
    yield made
    made.close()
