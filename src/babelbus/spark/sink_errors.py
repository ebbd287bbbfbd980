"""Errors of writing; each message is one line that says what to do."""

from babelbus.spark.errors import SparkError


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
