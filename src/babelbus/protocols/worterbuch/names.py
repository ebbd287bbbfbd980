"""The keys below `$SYS`, which the server sets itself (docs/specifications/worterbuch.md, 9)."""

SYS = "$SYS"


def is_below_sys(key: str) -> bool:
    """Return whether a key is `$SYS` or below it."""
    return key == SYS or key.startswith(f"{SYS}/")
