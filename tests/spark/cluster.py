"""A Spark standalone cluster on this machine: a master and two workers with one core each."""

from contextlib import ExitStack
from pathlib import Path

from tests.spark.daemons import command_of, daemon, family, wait_for

EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of a JVM that ends before better code would pay: it needs half the CPU time."""
CONF = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": SHORT_LIVED,
    "spark.driver.host": "127.0.0.1",
}
"""What an application has to be told so that each worker has room for one executor of it."""


class Cluster:
    """Runs from `with` to its end; `environment` is that of `daemons.environment`."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._environment = environment | {"SPARK_DAEMON_JAVA_OPTS": SHORT_LIVED}
        self._stack = ExitStack()
        self._workers: list[int] = []
        self.address = ""
        """What an application gives as its master."""
        self.work_folders = (folder / "one", folder / "two")
        """Where the workers keep a folder for each executor."""

    def __enter__(self) -> "Cluster":
        with self._stack as stack:
            log = self._folder / "master.log"
            at = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
            stack.enter_context(daemon("deploy.master.Master", self._environment, log, *at))
            self.address = wait_for(log, r"spark://127\.0\.0\.1:\d+")[0]
            about = (*at, "--cores", "1", "--memory", "600m", "--work-dir")
            logs = [Path(f"{folder}.log") for folder in self.work_folders]
            for folder, log in zip(self.work_folders, logs, strict=True):
                started = daemon("deploy.worker.Worker", self._environment, log, *about, str(folder), self.address)
                self._workers.append(stack.enter_context(started))
            for log in logs:
                wait_for(log, "Successfully registered with master")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def executors(self) -> list[int]:
        """Give the processes of the executors that run now; there are no other cluster's among them."""
        below = [one for worker in self._workers for one in family(worker) if one != worker]
        return [one for one in below if EXECUTOR in command_of(one)]

    def executor_of(self, pid: int) -> int:
        """Give the executor that a Python process of a task belongs to."""
        (found,) = (one for one in self.executors() if pid in family(one))
        return found
