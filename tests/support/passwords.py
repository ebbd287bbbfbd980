"""Hashes of passwords that take no time, in the processes of tests alone."""

from typing import Final

import nacl.pwhash

from babelbus.identities import passwords

REAL_COST: Final = passwords._COSTS["interactive"]
CHEAP: Final = "m=8,t=1,p=1"
"""How a cheap hash writes its parameters."""


def make_hashes_cheap() -> None:
    """Set the cost of a usual password to the least of argon2id: no test but those of the cost depends on its cost."""
    least = nacl.pwhash.argon2id
    passwords._COSTS["interactive"] = (least.OPSLIMIT_MIN, least.MEMLIMIT_MIN)
