"""The demo's data in a running server, loaded as a person loads it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples import flights
from tests.cli.shell import ENVIRONMENT, Served

SCRIPT = Path(__file__).parents[2] / "examples" / "load_demo.py"


@pytest.mark.skipif(importlib.util.find_spec(flights.PACKAGE) is None, reason="the flights are not installed")
def test_the_topics_of_the_ready_pipelines_are_loaded_once(tmp_path: Path) -> None:
    served = Served(tmp_path)

    def load() -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, str(SCRIPT), "--flights", "30"]
        return subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, text=True, capture_output=True, check=False, timeout=300
        )

    try:
        done = load()
        assert (done.returncode, done.stdout) == (
            0, "airlines: 16 records\nweather: 26,115 records\nflights: 30 records\n"
        ), done.stderr  # fmt: skip
        records = served.rows("fetch", "flights", "--json")
        assert [(one["key"], json.loads(one["payload"])["carrier"]) for one in records[:1]] == [("UA1545", "UA")]
        assert len(records) == 30
        assert json.loads(served.run("state", "get", "airlines/UA"))["name"] == "United Air Lines Inc."
        again = load()
        assert (again.returncode, "the topic airlines exists already" in again.stderr) == (1, True)
    finally:
        assert served.stop() == 0
