"""The table file of the configuration, which is applied at each start."""

from pathlib import Path

import msgspec
import pytest

from babelbus.config import AccessSettings
from babelbus.core.access import Action
from tests.access.house import ALICE, House, configured
from tests.support.server import LiveServer

GOOD = '[[rows]]\nwho = "role:walkers"\naction = "publish"\npattern = "walk/#"\n'


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ('[[rows]]\nwho = "alice"\naction = "fly"\npattern = "walk/#"\n', 7),
        ("[[rows]\n", 5),
        ('[[rows]]\nwho = "a*"\naction = "read"\npattern = "#"\n', 6),
    ],
)
def test_an_error_at_the_start_is_told_with_its_place_and_the_table_stays_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: str, line: int
) -> None:
    table = tmp_path / "table.toml"
    table.write_text(GOOD, encoding="utf-8")
    config = msgspec.structs.replace(configured(tmp_path), access=AccessSettings(mode="enforce", file=str(table)))
    with House(tmp_path, config):
        pass
    table.write_text(GOOD + more, encoding="utf-8")
    with LiveServer(config) as live:
        gate = live.server.gate
        assert gate.enforcing
        assert live.call(lambda: gate.table.explain(ALICE, Action.PUBLISH, "walk/a")).allowed
        assert not live.call(lambda: gate.table.explain(ALICE, Action.PUBLISH, "elsewhere")).allowed
    (told,) = [record.getMessage() for record in caplog.records if "the table stays as it was" in record.getMessage()]
    assert f"{table}, line {line}, column " in told
