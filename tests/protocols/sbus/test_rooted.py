"""Packets of processes with a root: what goes in and comes out again is the same, and nothing leaves the root."""

from hypothesis import given
from hypothesis import strategies as st

from babelbus.core.access.root import root_of
from babelbus.protocols.sbus.codec import MSG
from babelbus.protocols.sbus.messages import PACKET_BYTES_MAX
from babelbus.protocols.sbus.patterns import SbusPattern, subject_of
from babelbus.protocols.sbus.rooted import Edge
from babelbus.wire.packets import Packets

ROOT = root_of("tenants/é")
EDGE = Edge(ROOT)
keys = st.binary(max_size=12).map(lambda key: key.replace(b"\0", b"/"))
common = st.sampled_from([b"$SYS/x", b"!/cred/1/2/3/x"])


@given(st.lists(st.tuples(keys, st.binary(max_size=8)), min_size=1, max_size=5), st.data())
def test_a_packet_comes_out_as_it_went_in(sent: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    packets = [b"%b%b\0%b" % (MSG, key, payload) for key, payload in sent if not key.startswith((b"$", b"!/"))]
    if not packets:
        return
    first = data.draw(st.integers(0, len(packets) - 1))
    inward = EDGE.inward(Packets.of(packets), first, len(packets))
    texts = [inward.packet(number) for number in range(len(inward))]
    assert all(text.startswith(MSG + ROOT.prefix.encode()) for text in texts)
    outward = EDGE.outward(inward, 0, len(inward))
    assert [outward.packet(number) for number in range(len(outward))] == packets[first:]


@given(keys, keys)
def test_a_pattern_matches_below_the_root_what_it_matched_without_it(pattern: bytes, key: bytes) -> None:
    if pattern.startswith((b"$", b"!/")) or key.startswith((b"$", b"!/")):
        return
    made = SbusPattern(EDGE.absolute(pattern))
    assert made.matches_key(EDGE.absolute(key)) is SbusPattern(pattern).matches_key(key)
    assert not made.matches_key(b"tenants/other/" + key)


@given(common)
def test_the_names_that_are_common_stay(name: bytes) -> None:
    assert EDGE.absolute(name) == name
    assert not ROOT.contains(subject_of(EDGE.absolute(name)))
    packets = Packets.of([MSG + name + b"\0x"])
    assert EDGE.inward(packets, 0, 1).packet(0) == MSG + name + b"\0x"


def test_commands_stay_and_packets_that_would_be_too_long_are_left_out() -> None:
    long = MSG + b"k\0" + b"x" * (PACKET_BYTES_MAX - len(MSG) - 2)
    inward = EDGE.inward(Packets.of([b"CTL whoami", long, MSG + b"k\0x"]), 0, 3)
    assert [inward.packet(number) for number in range(len(inward))] == [
        b"CTL whoami",
        MSG + ROOT.prefix.encode() + b"k\0x",
    ]
    assert len(EDGE.inward(Packets.of([long]), 0, 1)) == 0
