"""The Python of Spark's workers, as the command `babelbus-spark-python`: this one, which starts faster so.

Spark puts its own `pyspark.zip` in front of what its workers import. There is no bytecode in it, so each new process
compiles what it imports, half a second's work: three seconds of the first query on two cores. Where the archive is that
of the installed package, the package itself is the same and is compiled. This module imports nothing of Spark: it runs
before each of them.

PySpark has its workers collect garbage after each task, and they look at all that they have imported: 25 ms, or a sixth
of what Python does in a task of a second. `keep_imports` spares them that, whatever Python they are.
"""

import gc
import os
import sys
import sysconfig
from collections.abc import Iterable
from itertools import count

COMMAND = "babelbus-spark-python"
_tasks = count()


def worker_python() -> str:
    """Return what to set `PYSPARK_PYTHON` to for workers on this machine; this Python if there is no such command."""
    command = os.path.join(os.path.dirname(sys.executable), COMMAND)
    return command if os.access(command, os.X_OK) else sys.executable


def without_archives(paths: Iterable[str], packages: str) -> list[str]:
    """Return what is left to import from when `packages`, the folder of installed ones, has what Spark's archives have.

    Its jar is taken away as well: there is no Python in it, and looking that up again and again takes time too.
    """
    spark = os.path.join(os.path.realpath(packages), "pyspark", "")
    return [path for path in paths if not os.path.realpath(path).startswith(spark)]


def keep_imports() -> None:
    """Keep the present objects of this process out of garbage collection, in the first two tasks of a Spark worker.

    In its first task PySpark imports pandas behind our last call: 29,000 objects, 17 ms of each later collection.
    """
    if next(_tasks) < 2:
        gc.freeze()


def main() -> None:
    """Replace this process by the Python that it runs in, with the same arguments."""
    paths = os.environ.get("PYTHONPATH")
    if paths:
        kept = without_archives(paths.split(os.pathsep), sysconfig.get_path("purelib"))
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])  # noqa: S606 - that is what it is for
