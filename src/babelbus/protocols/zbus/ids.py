"""UUIDs of sessions and messages."""

import os


class IdMaker:
    """Makes UUIDs of version 4, many at a time: asking the system for randomness costs more than the rest."""

    MANY = 256

    def __init__(self) -> None:
        self._made: list[str] = []

    def make(self) -> str:
        """Give a new one."""
        if not self._made:
            digits = os.urandom(16 * self.MANY).hex()
            for at in range(0, len(digits), 32):
                one = digits[at : at + 32]
                variant = "89ab"[int(one[16], 16) & 3]
                self._made.append(f"{one[:8]}-{one[8:12]}-4{one[13:16]}-{variant}{one[17:20]}-{one[20:]}")
        return self._made.pop()
