"""The dialects: which messages, codes and forms each has (sections 1, 11 and 13 of the specification)."""

import pytest

from babelbus.protocols.worterbuch import messages as m
from babelbus.protocols.worterbuch.codec import encode_info, encode_welcome
from babelbus.protocols.worterbuch.errors import ErrorCode
from babelbus.protocols.worterbuch.profiles import (
    HANDSHAKES,
    MAIN,
    MAJOR_0,
    PROFILES,
    V0_3,
    V0_4,
    V0_5,
    V0_6,
    V0_7,
    V0_7_OF_0_42,
    V0_7_OF_0_43,
    V0_8,
    V0_9,
    V0_10,
    V0_11,
    Greeting,
    Profile,
    choose_handshake,
    for_major,
)

EXAMPLES: list[tuple[m.ClientMessage, str]] = [
    (m.Handshake(()), "0.3 0.4 0.5 0.6"),
    (m.Get(1, "a"), "0.3 0.4 0.5 0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.PGet(1, "a"), "0.3 0.4 0.5 0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.Set(1, "a", b"1"), "0.3 0.4 0.5 0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.Subscribe(1, "a"), "0.3 0.4 0.5 0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.PSubscribe(1, "a"), "0.3 0.4 0.5 0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.Unsubscribe(1), "0.3 0.4 0.5 0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.Delete(1, "a"), "0.4 0.5 0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.PDelete(1, "a"), "0.4 0.5 0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.Publish(1, "a", b"1"), "0.5 0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.Ls(1), "0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.SubscribeLs(1), "0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.UnsubscribeLs(1), "0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.PLs(1), "0.9 0.10 0.11 main-0 main"),
    (m.SPubInit(1, "a"), "0.10 0.11 main-0 main"),
    (m.SPub(1, b"1"), "0.10 0.11 main-0 main"),
    (m.Authentication("a"), "0.7 0.7-0.42"),
    (m.Authorization("a"), "0.7 0.7-0.43 0.8 0.9 0.10 0.11 main-0 main"),
    (m.ProtocolSwitch(1), "main-0 main"),
    (m.CGet(1, "a"), "main"),
    (m.CSet(1, "a", b"1", 0), "main"),
    (m.Lock(1, "a"), "main"),
    (m.AcquireLock(1, "a"), "main"),
    (m.ReleaseLock(1, "a"), "main"),
    (m.Keepalive(), "0.3 0.4 0.5 0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10"),
    (m.Transform(1, "a", b"1"), ""),
    (m.Export(1, "a"), ""),
    (m.Import(1, "a"), ""),
]
ALL = {**PROFILES, MAJOR_0.name: MAJOR_0}


@pytest.mark.parametrize(("message", "names"), EXAMPLES)
def test_each_dialect_has_the_messages_of_its_servers(message: m.ClientMessage, names: str) -> None:
    assert {name for name, profile in ALL.items() if profile.refusal(message) is None} == set(names.split())


@pytest.mark.parametrize("profile", ALL.values())
def test_a_message_of_another_dialect_is_not_implemented_and_files_on_the_server_never(profile: Profile) -> None:
    assert profile.refusal(m.Transform(1, "a", b"1")) == 19
    handshaken = profile.greeting is Greeting.HANDSHAKE
    assert profile.refusal(m.Export(1, "/f")) == profile.refusal(m.Import(1, "/f")) == (255 if handshaken else 19)


@pytest.mark.parametrize(
    ("profile", "highest"),
    [
        *((V0_3, 7), (V0_4, 9), (V0_5, 9), (V0_6, 9), (V0_7, 13), (V0_7_OF_0_42, 13), (V0_7_OF_0_43, 14)),
        *((V0_8, 14), (V0_9, 14), (V0_10, 15), (V0_11, 15), (MAJOR_0, 15), (MAIN, 22)),
    ],
)
def test_a_client_is_sent_only_codes_of_its_age(profile: Profile, highest: int) -> None:
    for code in ErrorCode:
        sent = profile.error_code(code)
        if code <= highest:
            assert sent == code
        elif code == 14 and highest == 13:
            assert sent == 10
        else:
            assert sent == 255


@pytest.mark.parametrize(
    ("profile", "info"),
    [
        (V0_7_OF_0_42, '{"protocolVersion":"0.7","authenticationRequired":false}'),
        (V0_7_OF_0_43, '{"version":"2.0","protocolVersion":"0.7","authorizationRequired":false}'),
        (
            V0_7,
            '{"version":"2.0","protocolVersion":"0.7","authorizationRequired":false,"authenticationRequired":false}',
        ),
        (V0_8, '{"version":"2.0","protocolVersion":"0.8","authorizationRequired":false}'),
        (V0_9, '{"version":"2.0","protocolVersion":"0.9","authorizationRequired":false}'),
        (V0_10, '{"version":"2.0","protocolVersion":"0.10","authorizationRequired":false}'),
        (V0_11, '{"version":"2.0","protocolVersion":"0.11","authorizationRequired":false}'),
        *(
            (
                profile,
                '{"version":"2.0","supportedProtocolVersions":[[0,11],[1,1]],"protocolVersion":"0.11",'
                '"authorizationRequired":false}',
            )
            for profile in (MAIN, MAJOR_0)
        ),
    ],
)
def test_welcome_has_exactly_the_members_that_the_clients_of_its_age_expect(profile: Profile, info: str) -> None:
    assert encode_info(profile.info("2.0", authorization=False)) == info.encode()
    needed = profile.info("2.0", authorization=True)
    assert encode_info(needed) == info.replace("false", "true").encode()
    assert encode_welcome("C1", needed) == b'{"welcome":{"info":%b,"clientId":"C1"}}' % encode_info(needed)


def test_the_main_welcome_is_the_one_of_the_specification() -> None:
    assert encode_welcome("6a9f7a52-6a1b-4a33-9a9e-0d6f3a0e8a11", MAIN.info("1.5.0", authorization=False)) == (
        b'{"welcome":{"info":{"version":"1.5.0","supportedProtocolVersions":[[0,11],[1,1]],"protocolVersion":"0.11",'
        b'"authorizationRequired":false},"clientId":"6a9f7a52-6a1b-4a33-9a9e-0d6f3a0e8a11"}}'
    )


def test_states_carry_the_key_up_to_0_9() -> None:
    names = "0.3 0.4 0.5 0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9"
    assert {name for name, profile in ALL.items() if profile.pairs} == set(names.split())


def test_the_server_keeps_clients_of_0_6_to_0_10_alive() -> None:
    names = "0.6 0.7 0.7-0.42 0.7-0.43 0.8 0.9 0.10"
    assert {name for name, profile in ALL.items() if profile.keepalive} == set(names.split())


def test_only_0_3_reads_no_deletions() -> None:
    assert {name for name, profile in ALL.items() if not profile.deletions} == {"0.3"}


def test_each_dialect_has_the_greeting_of_its_messages_and_the_name_of_its_version() -> None:
    for profile in ALL.values():
        assert (profile.greeting is Greeting.HANDSHAKE) is (m.Handshake in profile.kinds)
        assert profile.name.partition("-")[0] in (profile.protocol_version, "main")


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        ([(0, 3)], V0_3),
        ([(0, 6), (0, 3)], V0_6),
        ([(0, 3), (0, 4), (0, 5)], V0_5),
        ([(0, 4), (0, 7), (1, 1)], V0_4),
        ([(0, 2)], None),
        ([(0, 7)], None),
        ([(1, 3)], None),
        ([], None),
    ],
)
def test_a_handshake_chooses_the_highest_version_of_both(
    offered: list[tuple[int, int]], chosen: Profile | None
) -> None:
    assert choose_handshake(offered) is chosen


def test_a_switch_chooses_by_the_major_number() -> None:
    assert for_major(0) is MAJOR_0
    assert for_major(1) is MAIN
    assert for_major(2) is None
    assert (MAJOR_0.version, MAIN.version) == ((0, 11), (1, 1))


def test_servers_0_30_to_0_34_are_told_of_wildcards_in_their_way() -> None:
    assert [profile for profile in ALL.values() if profile.historic_wildcards] == [V0_3, V0_4, V0_5]
    assert {profile.name for profile in HANDSHAKES} == {"0.3", "0.4", "0.5", "0.6"}
