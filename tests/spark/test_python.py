"""The Python of Spark's workers imports the installed package, not its archive, and is this Python otherwise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark

from babelbus.spark.python import COMMAND, without_archives, worker_python

PACKAGE = Path(next(iter(pyspark.__path__)))
ARCHIVES = [
    *map(str, (PACKAGE / "python" / "lib").glob("*.zip")),
    *map(str, (PACKAGE / "jars").glob("spark-core*.jar")),
]


def said(program: str, *arguments: str) -> list[str]:
    """What the workers' Python says when it is started as Spark does."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*ARCHIVES, "/some/where"])}
    command = [worker_python(), "-c", f"import json, os, sys; print(json.dumps({program}))", *arguments]
    found: list[str] = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    return found


def test_the_command_is_installed_and_is_this_python_with_the_same_arguments() -> None:
    assert len(ARCHIVES) == 3
    assert Path(worker_python()).name == COMMAND
    assert said("[sys.executable, *sys.argv[1:]]", "one two", "-m") == [sys.executable, "one two", "-m"]


def test_workers_import_the_package_and_keep_what_is_not_sparks() -> None:
    assert said("[os.environ['PYTHONPATH']]") == ["/some/where"]
    assert said("[__import__('pyspark').__file__]") == [str(PACKAGE / "__init__.py")]


def test_a_process_of_sparks_looks_at_its_imports_no_more() -> None:
    program = """import gc, pyspark.worker
from babelbus.spark.python import keep_imports
keep_imports()
import pandas  # as PySpark does in the first task, behind our last call
keep_imports()
print(gc.get_freeze_count(), len(gc.get_objects()))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, text=True)
    assert found.returncode == 0, found.stderr
    frozen, left = map(int, found.stdout.split())
    assert frozen > 10_000 > 100 > left


def test_the_archives_of_another_spark_are_kept() -> None:
    others = ["/opt/spark/python/lib/pyspark.zip", "/opt/spark/python/lib/py4j-0.10.9.9-src.zip", ""]
    assert without_archives([*others, ARCHIVES[0]], str(PACKAGE.parent)) == others
