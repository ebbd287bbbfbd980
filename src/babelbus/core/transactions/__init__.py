"""Staged, atomic appends: many writers stage records, one call commits all of them once."""

from babelbus.core.transactions.model import PartRef, StagedRecordsMissingError, StagingRefusedError
from babelbus.core.transactions.staging import Staging
from babelbus.core.transactions.transaction_file import TransactionDamagedError

__all__ = [
    "PartRef",
    "StagedRecordsMissingError",
    "Staging",
    "StagingRefusedError",
    "TransactionDamagedError",
]
