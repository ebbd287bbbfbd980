"""Errors of pipelines; each message is one line that names the file and the field."""

from babelbus.spark.errors import SparkError


class PipelineError(SparkError):
    """A pipeline's file is wrong, or what it asks for is not possible."""

    def __init__(self, file: str, field: str, problem: str) -> None:
        super().__init__(f"{file}: {field}: {problem}" if field else f"{file}: {problem}")
        self.file, self.field, self.problem = file, field, problem


class WorkerLateError(PipelineError):
    """A Python process of Spark's was not there in time: the machine is busy, and it may be the next time."""


class QueryFailedError(SparkError):
    """A query of a running pipeline ended with an error, and was not to be started again."""


class CheckpointInUseError(SparkError):
    """Another process runs on this folder: two queries on one checkpoint would destroy it."""
