"""State: the last value of each key as a tree, its log, locks and history (docs/state.md)."""

from babelbus.core.state.history import REVISIONS_MAX, AsOf, History, HistoryGoneError, Revision
from babelbus.core.state.key_index import SEPARATOR, KeyPattern
from babelbus.core.state.locks import Granted, LockHeldError, NotLockedError
from babelbus.core.state.log import Change, Kept, Kind, StateLog
from babelbus.core.state.patterns import (
    ELEMENTS_MAX,
    KEY_BYTES_MAX,
    MULTI_WILDCARD,
    WILDCARD,
    PatternFault,
    check_key,
    check_parent_pattern,
    check_pattern,
    children_pattern,
    covers,
    size_fault,
    store_pattern,
    subscription_pattern,
)
from babelbus.core.state.tree import (
    Commit,
    InvalidKeyError,
    NoSuchKeyError,
    State,
    Testament,
    VersionedError,
    VersionMismatchError,
)

__all__ = [
    "ELEMENTS_MAX",
    "KEY_BYTES_MAX",
    "MULTI_WILDCARD",
    "REVISIONS_MAX",
    "SEPARATOR",
    "WILDCARD",
    "AsOf",
    "Change",
    "Commit",
    "Granted",
    "History",
    "HistoryGoneError",
    "InvalidKeyError",
    "Kept",
    "KeyPattern",
    "Kind",
    "LockHeldError",
    "NoSuchKeyError",
    "NotLockedError",
    "PatternFault",
    "Revision",
    "State",
    "StateLog",
    "Testament",
    "VersionMismatchError",
    "VersionedError",
    "check_key",
    "check_parent_pattern",
    "check_pattern",
    "children_pattern",
    "covers",
    "size_fault",
    "store_pattern",
    "subscription_pattern",
]
