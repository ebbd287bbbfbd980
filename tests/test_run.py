"""`make test`: what a part of it prints, and what it leaves."""

import time
from pathlib import Path

import pytest

from tests.run import Part, left_behind
from tests.support.bus import SAFETY_NET_SECONDS

TESTS = """
import os
import subprocess

def test_leaves_a_process_of_another_session():
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("the process is", process.pid)
    print("hashes have seed", os.environ["PYTHONHASHSEED"])

def test_fails():
    assert False, "as it should"
"""


def test_a_part_tells_its_failures_and_ends_what_its_tests_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "test_leaving.py").write_text(TESTS)
    lines: list[str] = []
    options = ("-p", "no:cacheprovider", "-rA", "-W", "ignore", "--rootdir", str(tmp_path))
    part = Part("short", (*options, str(tmp_path / "test_leaving.py")), lines.append)
    assert part.wait(time.monotonic() + SAFETY_NET_SECONDS) == 1
    assert len(part.failures) == 1
    assert "test_fails" in part.failures[0]
    (ended,) = [line for line in lines if "left behind: sleep 1000" in line]
    number = int(ended.split("process ")[1].split(",")[0])
    assert any(f"the process is {number}" in line for line in lines)
    assert any(line.endswith("hashes have seed 0") for line in lines)
    deadline = time.monotonic() + SAFETY_NET_SECONDS
    while left_behind(part._mark):  # a process that was killed is there until the system has taken it down
        assert time.monotonic() < deadline
    assert all(line.startswith("short     | ") for line in lines)
