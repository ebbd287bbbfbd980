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
