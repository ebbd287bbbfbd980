"""The whole configuration: its sections, where it comes from, and what is refused together."""

import re
from collections.abc import Mapping
from urllib.parse import unquote_plus

import msgspec

from babelbus.config import settings
from babelbus.config.listeners import Listening, TlsSettings, is_loopback, speaks_tls
from babelbus.config.protocols import EventmeshSettings, JebpSettings, SbusSettings, WorterbuchSettings, ZbusSettings
from babelbus.config.server import (
    AccessSettings,
    AdminSettings,
    AuditSettings,
    LogSettings,
    QuotaSettings,
    ServerSettings,
)
from babelbus.config.settings import Setting
from babelbus.config.storage import (
    ClusterSettings,
    DataSettings,
    DbSettings,
    GroupsSettings,
    JetstreamSettings,
    StagingLimits,
    StateSettings,
    StorageSettings,
    TopicDefaults,
)
from babelbus.errors import ConfigError


class Config(msgspec.Struct, frozen=True):
    """The whole configuration of a server."""

    data: DataSettings = DataSettings()
    storage: StorageSettings = StorageSettings()
    topics: TopicDefaults = TopicDefaults()
    db: DbSettings = DbSettings()
    jetstream: JetstreamSettings = JetstreamSettings()
    cluster: ClusterSettings = ClusterSettings()
    groups: GroupsSettings = GroupsSettings()
    staging: StagingLimits = StagingLimits()
    jebp: JebpSettings = JebpSettings()
    sbus: SbusSettings = SbusSettings()
    state: StateSettings = StateSettings()
    worterbuch: WorterbuchSettings = WorterbuchSettings()
    zbus: ZbusSettings = ZbusSettings()
    eventmesh: EventmeshSettings = EventmeshSettings()
    admin: AdminSettings = AdminSettings()
    tls: TlsSettings = TlsSettings()
    quotas: QuotaSettings = QuotaSettings()
    access: AccessSettings = AccessSettings()
    audit: AuditSettings = AuditSettings()
    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()


def load(
    path: str | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> Config:
    """Load the configuration: defaults, then the file, then the environment, then the flags.

    `path` is the file of `--config`; without it BABELBUS_CONFIG names one, or `babelbus.toml` in the current folder
    is read if it exists. `environment` is what the command line passes from `os.environ`; `flags` are dotted keys,
    and a value of None means that the flag was not given.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or two settings conflict; the message names key and source.
    """
    values = settings.collect(Config, path, environment or {}, flags or {})
    of_cluster = {key: value for key, value in values.items() if key.startswith("cluster.")}
    if settings.build(Config, of_cluster).cluster.enabled:
        values.setdefault("topics.engine", settings.Value("jetstream", "cluster.enabled", False))
    config = settings.build(Config, values)
    if config.cluster.enabled:
        _check_cluster(config, values)
    if config.server.any_port:
        config = _choose_ports(config, values)
    _refuse_open_doors(config, values)
    return config


def _choose_ports(config: Config, values: Mapping[str, settings.Value]) -> Config:
    """Return the configuration with port 0 for every port that is not set."""
    changed = {}
    for section in Config.__struct_fields__:
        struct = getattr(config, section)
        named = [name for name in struct.__struct_fields__ if name == "port" or name.endswith("_port")]
        ports = [name for name in named if getattr(struct, name) is not None]  # None: no such listener
        free = {name: 0 for name in ports if name != "any_port" and f"{section}.{name}" not in values}
        if free:
            changed[section] = msgspec.structs.replace(struct, **free)
    return msgspec.structs.replace(config, **changed)


def read_topic_changes(changes: Mapping[str, object]) -> dict[str, object]:
    """Check settings of one topic (keys of [topics], without the section) and return them as plain values.

    Sizes and durations may be text with a unit ("7d"); None or "none" clears an optional setting.

    Raises:
        ConfigError: a key is unknown or a value wrong; the message names the key.
    """
    return settings.read(TopicDefaults, changes, source="the request")


def describe() -> list[Setting]:
    """Return every setting, in the order of the sections, as documentation, help and `babelbus config` show them."""
    return settings.describe(Config)


def render(config: Config, *, comments: bool = False) -> str:
    """Return `config` as a babelbus.toml; with `comments`, the meaning of each key above it."""
    return settings.render(config, comments=comments)


_PASSWORD = re.compile(r"[^/]+:\s*//[^@?]*:[^@]+@")
_PASSWORD_WORD = re.compile(r"password\s*=", re.IGNORECASE)


def _has_password(url: str) -> bool:
    """Return whether a URL has a password, in front of the host or as an option."""
    return bool(_PASSWORD.match(url) or _PASSWORD_WORD.search(unquote_plus(unquote_plus(url))))


def _refuse_open_doors(config: Config, values: Mapping[str, settings.Value]) -> None:
    """Refuse settings that would let strangers in by mistake (docs/design/design.md, section 6)."""
    if config.db.url is not None and _has_password(config.db.url):
        raise ConfigError("db.url has a password in it, which would be shown; put it into PGPASSWORD or a .pgpass file")
    if config.worterbuch.auth_key_set is not None and _has_password(config.worterbuch.auth_key_set):
        raise ConfigError("worterbuch.auth_key_set has a password in it, which would be shown; key sets are public")
    if config.server.insecure:
        return
    enforced = config.access.mode == "enforce"
    for name in config.__struct_fields__:
        section = getattr(config, name)
        if not isinstance(section, Listening) or not section.enabled or is_loopback(section.host):
            continue
        has_tls = speaks_tls(section, config.tls)
        place = f"{name}.host = {section.host!r} (from {_source_of(f'{name}.host', values)})"
        # The table says what strangers may do; but a bare certificate is a proof that others can repeat.
        is_guarded = enforced and not getattr(section, "bare_certificates", False)
        is_guarded |= config.tls.client_certificates == "required" and has_tls  # each client proves who it is
        if section.exposure is not None and not is_guarded:
            advice = (
                f"turn {name}.bare_certificates off"
                if enforced
                else 'set access.mode = "enforce", so that principals do what the table grants (a gate that only '
                "'babelbus access enable' turned on does not count: it can be turned off while the server listens)"
            )
            raise ConfigError(
                f"{place} would be reachable from other machines {section.exposure}; {advice}; "
                f"or server.insecure = true if a firewall or proxy protects it"
            )
        if section.overheard is not None and not has_tls and not config.server.plain_text:
            has_choice = getattr(section, "tls", None)
            raise ConfigError(
                f"{place} has no TLS, so others on the way could {section.overheard}; set "
                f"tls.cert_file and tls.key_file{'' if has_choice is None else f', and no {name}.tls'}; "
                f"or server.plain_text = true if a proxy in front speaks TLS"
            )


def _check_cluster(config: Config, values: Mapping[str, settings.Value]) -> None:
    cluster = config.cluster
    if config.jetstream.servers is None:
        raise ConfigError("cluster.enabled needs jetstream.servers: the addresses of your NATS servers")
    if not config.jetstream.lease_seconds:
        raise ConfigError("cluster.enabled needs jetstream.lease_seconds above 0: the lease says which member owns")
    if config.topics.engine in ("disk", "db"):
        raise ConfigError(
            f"topics.engine = {config.topics.engine!r} (from {_source_of('topics.engine', values)}) would keep topics"
            " where other members of the cluster cannot read them; set jetstream, or memory for what may be lost"
        )
    files = (cluster.cert_file, cluster.key_file, cluster.ca_file)
    if any(files) and not all(files):
        raise ConfigError("cluster.cert_file, cluster.key_file and cluster.ca_file go together: set all three or none")
    if cluster.advertise is not None and not cluster.advertise.rpartition(":")[2].isdecimal():
        raise ConfigError(f"cluster.advertise = {cluster.advertise!r} is no HOST:PORT")
    advertised = cluster.host if cluster.advertise is None else cluster.advertise.rpartition(":")[0].strip("[]")
    if not all(files) and not (is_loopback(cluster.host) and is_loopback(advertised)):
        raise ConfigError(
            f"cluster.host = {cluster.host!r} (from {_source_of('cluster.host', values)}) would be reachable from other"
            " machines without TLS; set cluster.cert_file, cluster.key_file and cluster.ca_file"
        )


def _source_of(key: str, values: Mapping[str, settings.Value]) -> str:
    return values[key].source if key in values else "the default"
