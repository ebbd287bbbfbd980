"""Batches of fronts as bytes: an edge and its core may be machines of different kinds."""

from babelbus.protocols.jebp.batch_codec import ClientBatch, decode_batch, encode_batch

BATCH = ClientBatch(b"t", [1, 258], [2, 1], [3, 4, -5], [b"one", b"", b"three"])
BYTES = (
    b"\x01t\0\0\0\x02\0\0\0\x03"
    b"\0\0\0\x01\0\0\x01\x02"
    b"\x02\x01"
    b"\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0\x04\xff\xff\xff\xff\xff\xff\xff\xfb"
    b"\0\0\0\x03\0\0\0\0\0\0\0\x05"
    b"onethree"
)


def test_numbers_are_big_endian_as_those_of_the_frames_of_a_link() -> None:
    assert encode_batch(BATCH) == BYTES
    batch = decode_batch(BYTES)
    assert (batch.topic, list(batch.numbers), list(batch.counts)) == (b"t", [1, 258], [2, 1])
    assert (batch.timestamps, batch.payloads) == ([3, 4, -5], [b"one", b"", b"three"])
