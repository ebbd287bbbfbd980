"""Staged, atomic appends: many writers stage records, one call commits all of them once."""
