"""The TCP listeners of a member that is an edge of another server: those of its own configuration."""

from babelbus.config import Config
from babelbus.listening.openings import Opening, openings_for
from babelbus.protocols.registry import openings

ADMIN = "admin"


def openings_of(config: Config) -> list[Opening]:
    """Return the TCP listeners of a configuration, with the administration endpoint.

    Raises:
        ConfigError: a setting of a section is wrong.
    """
    admin = config.admin
    found = openings(config)
    if admin.enabled:
        found += openings_for("admin", admin, {ADMIN: admin.port})
    return found
