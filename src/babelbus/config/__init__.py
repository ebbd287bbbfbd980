"""Every setting: its unit, default and reason.

One frozen struct per section; a field is the key `section.field` in babelbus.toml, `BABELBUS_SECTION_FIELD` in the
environment. The texts here are the ones that `babelbus config`, `--help` and docs/settings.md show.
"""

from babelbus.config.configuration import Config, describe, load, read_topic_changes, render
from babelbus.config.listeners import TlsSettings, is_loopback, speaks_tls
from babelbus.config.protocols import EventmeshSettings, JebpSettings, SbusSettings, WorterbuchSettings, ZbusSettings
from babelbus.config.server import (
    AccessSettings,
    AdminSettings,
    QuotaSettings,
    ServerSettings,
)
from babelbus.config.storage import (
    Ack,
    ClusterSettings,
    DataSettings,
    DbSettings,
    GroupsSettings,
    JetstreamSettings,
    LogLayout,
    StagingLimits,
    StateSettings,
    StorageSettings,
    TopicDefaults,
    TopicLayout,
)

__all__ = [
    "AccessSettings",
    "Ack",
    "AdminSettings",
    "ClusterSettings",
    "Config",
    "DataSettings",
    "DbSettings",
    "EventmeshSettings",
    "GroupsSettings",
    "JebpSettings",
    "JetstreamSettings",
    "LogLayout",
    "QuotaSettings",
    "SbusSettings",
    "ServerSettings",
    "StagingLimits",
    "StateSettings",
    "StorageSettings",
    "TlsSettings",
    "TopicDefaults",
    "TopicLayout",
    "WorterbuchSettings",
    "ZbusSettings",
    "describe",
    "is_loopback",
    "load",
    "read_topic_changes",
    "render",
    "speaks_tls",
]
