"""File descriptors of the process: connections leave the last descriptors to files and to the administration."""

import logging
import resource

log = logging.getLogger(__name__)

FEW = 4_096
"""A limit below this is soon reached; a larger limit than `connections_max` needs is usual on no machine."""
RESERVE_MAX = 256
"""Descriptors that no client of a protocol takes, where the limit is large enough."""
UNLIMITED = 2**31


def is_reserved(descriptor: int, *, is_admin: bool = False) -> bool:
    """Return whether a new connection took a descriptor of the reserve, half of which is for the administration.

    The system gives the lowest number that is free, so a high number means that all lower ones are in use.
    """
    limit = _limits()[0]
    reserve = _reserve(limit)
    return descriptor >= limit - (reserve // 2 if is_admin else reserve)


def raise_limit(connections_max: int) -> None:
    """Raise the limit of descriptors as far as the system allows, and log if `connections_max` connections pass it."""
    limit, hard = _limits()
    if limit < hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            limit = hard
        except (OSError, ValueError) as error:  # systems other than Linux state a hard limit that is above the true one
            log.warning("the limit of open files stays at %d: %s", limit, error)
    if connections_max > limit - _reserve(limit):
        log.log(
            logging.WARNING if limit < FEW else logging.INFO,
            "the connections_max of all protocols allow %d connections, but only %d files can be open, %d of them kept "
            "for the data: raise the hard limit of open files (LimitNOFILE, ulimit -n), or lower connections_max",
            connections_max,
            limit,
            _reserve(limit),
        )


def _limits() -> tuple[int, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        UNLIMITED if soft == resource.RLIM_INFINITY else soft,
        UNLIMITED if hard == resource.RLIM_INFINITY else hard,
    )


def _reserve(limit: int) -> int:
    return min(limit // 4, RESERVE_MAX)
