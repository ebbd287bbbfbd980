"""State: the last value of each key as a tree, its log, locks and history (docs/state.md)."""
