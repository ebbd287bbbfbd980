"""The recipes of docs/access-recipes.md, run as they stand there against a real server."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shell import Served

PAGE = Path(__file__).parents[2] / "docs" / "access-recipes.md"
EXPLAINED = {
    "acme publish orders": "may publish tenants/acme/orders",
    "globex publish orders": "may publish tenants/globex/orders",
    "audrey read tenants/acme/orders": "may read tenants/acme/orders",
    "dashboard subscribe hr/salaries": "because of the row: deny dashboard * hr/#",
    "sensor7 publish plant/sensor7/heat": "because of the row: allow role:devices publish plant/{name}/#",
    "sensor7 publish plant/sensor8/heat": "because no row allows it",
    "spark publish flights": "may not publish",
}
"""What `babelbus access explain` says, by its arguments."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path)
    yield server
    code = server.stop()
    server.kill_started()
    assert code == 0


def commands() -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def test_the_recipes_do_what_they_say(served: Served) -> None:
    explained = {}
    for command in commands():
        said = served.run(*command)
        if command[:2] == ["access", "explain"]:
            explained[" ".join(command[2:])] = said
    assert explained.keys() == EXPLAINED.keys()
    for asked, words in EXPLAINED.items():
        assert words in explained[asked]


def test_a_key_is_rotated_without_a_gap(served: Served) -> None:
    served.run("principals", "add", "sensor7", "--api-key")
    served.run("principals", "change", "sensor7", "--api-key")
    (shown,) = served.rows("principals", "show", "sensor7", "--json")
    old, new = (one["id"] for one in shown["credentials"])
    served.run("principals", "change", "sensor7", "--remove-credential", old)
    (shown,) = served.rows("principals", "show", "sensor7", "--json")
    assert [one["id"] for one in shown["credentials"]] == [new]
