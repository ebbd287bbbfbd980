"""Errors between Spark and the bus; each message is one line that says what to do or what is left."""

from babelbus.errors import BabelbusError


class SparkError(BabelbusError):
    """The root of what the data source raises on purpose."""


class OptionError(SparkError):
    """An option is unknown, missing, has the wrong value or does not go with another; the message names it."""


class SchemaError(SparkError):
    """A column that was asked for does not exist or has another type."""


class UnknownTopicError(SparkError):
    """The topic is not there, or we may not read it."""

    def __init__(self, topic: str, where: str) -> None:
        super().__init__(f"there is no topic {topic!r} {where}")
        self.topic = topic


class NoRecordError(SparkError):
    """No record is at or after the timestamp that reading should begin at."""


class DataLossError(SparkError):
    """Records that were asked for are not there any more: retention, or the topic was removed or made again."""

    def __init__(self, topic: str, partition: int, wanted: int, available: tuple[int, int] | None, why: str) -> None:
        there = "none" if available is None else f"offsets {available[0]} to {available[1]} (excluded)"
        super().__init__(
            f"topic {topic!r}, partition {partition}: offset {wanted} was wanted, available: {there}; {why}."
            " With the option failOnDataLoss=false what is left is read"
        )
        self.topic, self.partition, self.wanted, self.available = topic, partition, wanted, available


class RecordsRefusedError(SparkError):
    """The server has the records and does not give them: the first one is damaged, or its disk failed."""

    def __init__(self, topic: str, partition: int, offset: int | None, reason: str) -> None:
        where = "" if offset is None else f", offset {offset}"
        super().__init__(f"topic {topic!r}, partition {partition}{where} cannot be read: {reason}")
        self.topic, self.partition, self.offset = topic, partition, offset


class RowRefusedError(SparkError):
    """A row cannot be a record, and there is no topic where it would go instead; `advice` says what would help."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"a row cannot be published: {reason}; {advice}")
        self.reason = reason


class TargetError(SparkError):
    """Nothing can go to a topic that an option names."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"option {option}: {reason}")
        self.option = option


class OutputModeError(SparkError):
    """The output mode asks for what a log cannot do."""


class SinkOwnerError(SparkError):
    """Another query has committed under this transaction id, whose batch ids are not ours."""

    def __init__(self, transaction: str, owner: str, query: str) -> None:
        super().__init__(
            f"transaction id {transaction!r} belongs to the query {owner}, this one is {query or 'none'}: its"
            " checkpoint was deleted, or the id is used twice; batches that were committed would be skipped. Go on"
            " with the old checkpoint, or give another txnId (or checkpointLocation) and everything is published again"
        )
        self.transaction, self.owner = transaction, owner


class OldCheckpointError(SparkError):
    """A stream runs a batch again although a later one was published: what it reads now may not have been in it."""

    def __init__(self, transaction: str, batch_id: int) -> None:
        super().__init__(
            f"batch {batch_id} comes again, and a later batch of the transaction id {transaction!r} was published: the"
            " checkpoint is an old copy, or has lost its end. Go on with the newer checkpoint, or give another txnId"
            " and what was published since is published again"
        )
        self.transaction, self.batch_id = transaction, batch_id


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


class NoteDamagedError(SparkError):
    """The note of a save cannot be read."""
