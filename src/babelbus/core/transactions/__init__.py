"""Staged, atomic appends: many writers stage records, one call commits all of them once."""

from babelbus.core.transactions.model import PartRef
from babelbus.core.transactions.parts import find_damage
from babelbus.core.transactions.staging import Staging

__all__ = ["PartRef", "Staging", "find_damage"]
