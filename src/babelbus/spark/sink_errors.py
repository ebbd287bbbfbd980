"""What goes wrong when Spark writes; each message is one line that says what to do."""

from babelbus.spark.errors import SparkError


class RowRefusedError(SparkError):
    """A row cannot be a record; with the option deadLetterTopic it would go there instead."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"a row cannot be published: {reason}; with the option deadLetterTopic such rows go there")
        self.reason = reason


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
