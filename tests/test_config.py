import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from babelbus.config import Config, describe, is_loopback, load, read_topic_changes, render
from babelbus.config.settings import variable_of
from babelbus.core.settings import TopicSettings
from babelbus.errors import ConfigError
from babelbus.units import UnitError, format_duration, format_size, parse_duration, parse_size


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "babelbus.toml") -> str:
    Path(name).write_text(text)
    return name


def test_without_file_environment_and_flags_everything_is_the_default() -> None:
    assert load() == Config()


def test_flags_win_over_the_environment_and_that_over_the_file() -> None:
    write('[jebp]\nport = 1\nhost = "127.0.0.2"\n[admin]\nport = 1\n[log]\nlevel = "debug"\n')
    config = load(None, {"BABELBUS_JEBP_PORT": "2", "BABELBUS_ADMIN_PORT": "2"}, {"jebp.port": 3, "log.level": None})
    assert (config.jebp.port, config.admin.port, config.jebp.host, config.log.level) == (3, 2, "127.0.0.2", "debug")


def test_a_named_file_is_read_instead_of_the_one_in_the_folder() -> None:
    write("[jebp]\nport = 1\n")
    assert load(write("[jebp]\nport = 2\n", "other.toml")).jebp.port == 2
    assert load(None, {"BABELBUS_CONFIG": "other.toml"}).jebp.port == 2


def test_a_named_file_must_be_there() -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load("missing.toml")


def test_sizes_and_durations_may_have_units_everywhere() -> None:
    write('[topics]\nretention_seconds = "1h30m"\n')
    config = load(None, {"BABELBUS_STORAGE_SEGMENT_BYTES": "1GiB"}, {"server.drain_seconds": "250ms"})
    assert config.topics.retention_seconds == 5400
    assert config.storage.segment_bytes == 2**30
    assert config.server.drain_seconds == 0.25


def test_the_environment_and_flags_know_booleans_and_numbers_as_text() -> None:
    config = load(None, {"BABELBUS_ADMIN_ENABLED": "false", "BABELBUS_JEBP_PORT": " 99 "}, {"server.uvloop": "0"})
    assert (config.admin.enabled, config.jebp.port, config.server.uvloop) == (False, 99, False)


def test_none_clears_what_a_weaker_place_set() -> None:
    write("[topics]\nretention_bytes = 4096\n")
    assert load().topics.retention_bytes == 4096
    assert load(None, {}, {"topics.retention_bytes": "none"}).topics.retention_bytes is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[jebp]\nprot = 1\n", r"jebp\.prot \(from babelbus\.toml\) is no setting; did you mean jebp\.port\?"),
        ("[jepb]\nport = 1\n", r"jepb\.port .* did you mean jebp\.port\?"),
        ("port = 1\n", "port in babelbus.toml is outside of any section"),
        ('[jebp]\nport = "1"\n', r"jebp\.port = '1' \(from babelbus\.toml\)"),
        ("[jebp]\nport = 65536\n", r"jebp\.port = 65536 .*65535"),
        ('[topics]\nack = "maybe"\n', r"topics\.ack = 'maybe'.*accepted or written or flushed"),
        ('[storage]\nsegment_bytes = "much"\n', r"storage\.segment_bytes = 'much'"),
        ("[server]\ndrain_seconds = inf\n", r"server\.drain_seconds.*finite"),
        ("[jebp\n", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(text: str, told: str) -> None:
    write(text)
    with pytest.raises(ConfigError, match=told):
        load()


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("BABELBUS_JEBP_PORT", "many", r"jebp\.port = 'many' \(from the environment variable BABELBUS_JEBP_PORT\)"),
        ("BABELBUS_LOG_LVL", "info", "BABELBUS_LOG_LVL is no setting; did you mean BABELBUS_LOG_LEVEL"),
        ("BABELBUS_STORGE_SEGMENT_BYTES", "1", "did you mean BABELBUS_STORAGE_SEGMENT_BYTES"),
    ],
)
def test_a_mistake_in_the_environment_is_named_with_its_variable(variable: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(None, {variable: value})


def test_variables_that_kubernetes_adds_for_a_service_of_our_name_are_not_ours() -> None:
    variables = ("BABELBUS_PORT", "BABELBUS_SERVICE_HOST", "BABELBUS_PORT_8600_TCP_ADDR", "BABELBUS_SERVICE_PORT_JEBP")
    assert load(None, dict.fromkeys(variables, "tcp://10.0.0.1:8600")) == Config()


def test_an_unknown_flag_is_named() -> None:
    with pytest.raises(ConfigError, match=r"jebp\.prot \(from the command line\)"):
        load(None, {}, {"jebp.prot": 1})


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@host/bus",
        "postgresql://me@host/bus?password=hunter2",
        "postgresql://host/bus?sslmode=require&p%61ssword=hunter2",
        "postgresql://host/bus?sslpassword=hunter2",
        "postgresql://me@host/bus?application_name=a;password=hunter2",
        "postgresql://me@host/bus?conninfo=password%3Dhunter2",
        "postgresql://me:hunter2/with@slash@host/bus",
        "postgresql://me@host/bus password=hunter2",
        "postgresql: //me:hunter2@host/bus",
    ],
)
def test_a_password_anywhere_in_the_url_of_the_database_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="PGPASSWORD") as caught:
        load(None, {"BABELBUS_DB_URL": url})
    assert "hunter2" not in str(caught.value)
    assert load(None, {"BABELBUS_DB_URL": "postgresql://me@host/bus?passfile=/etc/pgpass"}).db.url is not None


def test_a_password_in_the_url_of_a_key_set_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="auth_key_set has a password") as caught:
        load(None, {"BABELBUS_WORTERBUCH_AUTH_KEY_SET": "https://me:hunter2@host/keys"})
    assert "hunter2" not in str(caught.value)


def test_an_open_door_beyond_loopback_is_refused_unless_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"admin\.host = '0\.0\.0\.0' \(from the command line\).*server\.insecure"):
        load(None, {}, {"admin.host": "0.0.0.0"})
    bare = {"jebp.host": "::", "jebp.bare_certificates": True}
    with pytest.raises(ConfigError, match=r"jebp\.host = '::'"):
        load(None, {}, bare)
    assert load(None, {}, bare | {"server.insecure": True}).jebp.host == "::"
    with pytest.raises(ConfigError, match=r"turn jebp\.bare_certificates off"):
        load(None, {}, bare | {"access.mode": "enforce"})
    assert load(None, {}, {"jebp.host": "::", "access.mode": "enforce"}).jebp.host == "::"
    assert load(None, {}, {"jebp.host": "0.0.0.0"}).jebp.host == "0.0.0.0"  # jebp proves who is who by itself
    assert load(None, {}, {"admin.host": "0.0.0.0", "admin.enabled": False}).admin.host == "0.0.0.0"


def test_the_error_says_that_the_configuration_and_not_the_table_turns_the_gate_on_beyond_loopback() -> None:
    with pytest.raises(ConfigError, match=r"set access\.mode = .enforce.*'babelbus access enable' .* does not count"):
        load(None, {}, {"zbus.host": "0.0.0.0"})


@pytest.mark.parametrize(
    ("section", "more", "risk"),
    [
        ("admin", {}, "read the passwords and tokens of clients"),
        ("eventmesh", {}, "read the passwords and tokens of clients"),
        ("worterbuch", {"worterbuch.auth_key_file": "key"}, "read the tokens of clients"),
        ("zbus", {"zbus.auth_file": "keys"}, "send the signed messages of clients again"),
    ],
)
@pytest.mark.parametrize("mode", ["off", "enforce"])
def test_passwords_and_tokens_do_not_cross_the_network_in_plain_text_unless_asked_for(
    section: str, more: dict[str, object], risk: str, mode: str
) -> None:
    flags: dict[str, object] = {f"{section}.host": "0.0.0.0", "access.mode": mode, **more}
    if mode == "off" and not more:
        with pytest.raises(ConfigError, match=r'set access\.mode = "enforce"'):
            load(None, {}, flags | {"server.plain_text": True})
        return
    text = rf"{section}\.host = '0\.0\.0\.0' \(from the command line\) .* could {risk}; set tls\.cert_file and "
    with pytest.raises(ConfigError, match=text + r"tls\.key_file; or server\.plain_text = true"):
        load(None, {}, flags)
    tls: dict[str, object] = {"tls.cert_file": "c", "tls.key_file": "k"}
    with pytest.raises(ConfigError, match=rf"{text}tls\.key_file, and no {section}\.tls;"):
        load(None, {}, flags | tls | {f"{section}.tls": False})
    for way in (tls, {"server.plain_text": True}, {"server.insecure": True}):
        load(None, {}, flags | way)


def test_what_is_encrypted_by_itself_or_has_no_secrets_needs_no_tls_beyond_loopback() -> None:
    load(None, {}, {"jebp.host": "0.0.0.0", "access.mode": "enforce"})
    load(None, {}, {"worterbuch.host": "0.0.0.0", "access.mode": "enforce"})  # no key, so there are no tokens


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("", False), ("127.example", False)],
)
def test_only_addresses_of_this_machine_are_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_what_is_rendered_reads_back_as_the_same() -> None:
    flags = {"data.folder": 'a "quoted" \\ földer\x7f', "topics.retention_seconds": 0.5, "topics.segment_bytes": "2MiB"}
    for comments in (False, True):
        config = load(None, {}, flags)
        assert load(write(render(config, comments=comments), "rendered.toml")) == config
    assert '\nsegment_bytes = "2 MiB"\n' in render(config)
    assert '\nretention_seconds = "500ms"\n' in render(config)


def test_a_whole_number_of_seconds_is_a_duration_too() -> None:
    assert load(write('[zbus]\nweb_cache_seconds = "1h"\n', "cache.toml")).zbus.web_cache_seconds == 3600


def test_every_setting_is_described_and_has_a_variable_of_its_own() -> None:
    described = describe()
    assert len({variable_of(setting.key) for setting in described}) == len(described)
    assert all(setting.doc and setting.type and setting.default for setting in described)
    units = {"_bytes": "bytes", "_bytes_max": "bytes", "_seconds": "seconds"}
    for setting in described:
        for ending, unit in units.items():
            assert not setting.key.endswith(ending) or setting.unit == unit


def test_changes_of_a_topic_are_checked_and_read_by_the_same_rules() -> None:
    assert read_topic_changes({"retention_seconds": "7d", "segment_bytes": "1MiB", "ack": "written"}) == {
        "retention_seconds": 604_800.0,
        "segment_bytes": 2**20,
        "ack": "written",
    }
    assert read_topic_changes({"retention_seconds": None, "retention_bytes": "none"}) == {
        "retention_seconds": None,
        "retention_bytes": None,
    }
    with pytest.raises(ConfigError, match=r"retention \(from the request\) is no setting; did you mean retention_"):
        read_topic_changes({"retention": 5})


def test_the_defaults_of_topics_are_the_settings_that_a_topic_has() -> None:
    configurable = {setting.key.removeprefix("topics.") for setting in describe() if setting.key.startswith("topics.")}
    assert configurable == {*TopicSettings.__struct_fields__, "partitions"}


@given(st.integers(min_value=0, max_value=2**60))
def test_a_size_reads_back_as_it_was_written(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(min_value=0, max_value=10**12))
def test_a_duration_reads_back_as_it_was_written(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("8 MB", 8_000_000), ("1.5KiB", 1536), ("2gib", 2**31), ("7b", 7)]
)
def test_a_size_is_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5", "0.3KiB", "1 XB", "1e9", "١", "1MiB 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("1.5", 1.5), ("2w", 1_209_600), ("1h 30m", 5400), ("0.5s", 0.5)]
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1s", "7days", "1h30", "inf", "nan", "1e3", "M"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_duration(text)


def test_reading_the_configuration_leaves_the_process_environment_alone() -> None:
    before = dict(os.environ)
    load(None, {"BABELBUS_JEBP_PORT": "2"})
    assert dict(os.environ) == before


CLUSTER = {"cluster.enabled": True, "jetstream.servers": "nats://127.0.0.1:4222"}


def test_topics_of_a_cluster_are_in_nats_unless_the_configuration_says_memory() -> None:
    assert load(None, {}, CLUSTER).topics.engine == "jetstream"
    assert load(None, {}, CLUSTER | {"topics.ack": "replicated"}).topics.ack == "replicated"
    assert load(None, {}, CLUSTER | {"topics.engine": "memory"}).topics.engine == "memory"
    assert load().topics.engine == "disk"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"jetstream.servers": None}, "cluster.enabled needs jetstream.servers"),
        ({"jetstream.lease_seconds": 0}, "cluster.enabled needs jetstream.lease_seconds above 0"),
        ({"topics.engine": "disk"}, "topics.engine = 'disk' .from the command line. would keep topics"),
        ({"topics.engine": "db"}, "set jetstream, or memory"),
        ({"cluster.cert_file": "a.pem"}, "go together"),
        ({"cluster.host": "10.0.0.1"}, "cluster.host = '10.0.0.1' .from the command line. would be reachable"),
        ({"cluster.advertise": "10.0.0.1:5330"}, "without TLS"),
        ({"cluster.advertise": "127.0.0.1"}, "is no HOST:PORT"),
    ],
)
def test_settings_that_make_no_cluster_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(None, {}, CLUSTER | changes)
