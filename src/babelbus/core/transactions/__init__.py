"""Staged, atomic appends: many writers stage records, one call commits all of them once."""

from babelbus.core.transactions.model import (
    STATE_SUFFIX,
    PartRef,
    StagedRecordsMissingError,
    StagingRefusedError,
    TransactionDamagedError,
)
from babelbus.core.transactions.part_file import find_damage
from babelbus.core.transactions.staging import Staging

__all__ = [
    "STATE_SUFFIX",
    "PartRef",
    "StagedRecordsMissingError",
    "Staging",
    "StagingRefusedError",
    "TransactionDamagedError",
    "find_damage",
]
