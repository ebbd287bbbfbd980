"""Records and topics that are hard to show: each page says so in a sentence."""

import pytest

from tests.interop.console.conftest import Window
from tests.interop.console.world import World

pytestmark = pytest.mark.interop

RECORDS = {
    "large": (b"x" * (8 * 2**20), (), "only the beginning is shown"),
    "headers": (b"", tuple((b"h%d" % number, b"x" * 8_000) for number in range(126)), "Headers"),
    "bytes": (b"\xff\xfe\x00" * 100, (), "Hex"),
    "deep": (b"[" * 10_000 + b"]" * 10_000, (), "As other protocols see it"),
}
"""Name of a topic, the payload and the headers of its record, and what the dialog of the record shows."""


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_is_hard_to_show_is_shown_with_a_sentence(window: Window, world: World, name: str) -> None:
    payload, headers, sentence = RECORDS[name]
    topic = f"hard-{name}"
    world.create(topic)
    world.client.publish(topic, payload, headers=headers)
    window.open(f"/browse/{topic}", "Partition 0 has the offsets")
    window.page.get_by_label("Open the record at offset 0").click()
    window.dialog.get_by_text(sentence).first.wait_for()


def test_a_topic_that_is_removed_under_an_open_page_says_so(window: Window, world: World) -> None:
    world.create("short-lived")
    window.open("/topics/short-lived", "Partitions")
    world.ask("DELETE", "/api/topics/short-lived")
    window.wait("There is no such topic.")


def test_offsets_that_are_to_come_show_the_end(window: Window) -> None:
    window.open("/browse/orders?partition=0&offset=999999", "up to 40, without that one")
