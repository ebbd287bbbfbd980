"""SIGKILL of the driver and of the server while a stream is copied: what comes out is what went in, once.

Row 22 of the fault matrix in docs/design/reliability.md. BABELBUS_TEST_SEED chooses other moments.
"""

import os
import random
from pathlib import Path

import pytest

from tests.spark.copying import Copy
from tests.spark.support import numbered

SEED = int(os.environ.get("BABELBUS_TEST_SEED", "1"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("seed", "records", "kills"),
    [(SEED, 300, 2), *(pytest.param(seed, 20_000, 12, marks=pytest.mark.slow) for seed in range(SEED, SEED + 3))],
)
def test_what_is_copied_by_a_driver_that_is_killed_again_and_again_is_there_once(
    tmp_path: Path, seed: int, records: int, kills: int
) -> None:
    chance = random.Random(seed)
    moments = sorted(chance.sample(range(records * 3 // 4), kills))
    with Copy(tmp_path, numbered(records)) as copy:
        for moment in moments:
            with copy.driver() as driver:
                copy.until(moment, driver)
                driver.runs_for(chance.uniform(0, 0.3))  # into a batch; whatever it hits is right
                driver.kill()
        with copy.driver() as driver:
            copy.until(chance.randrange(records * 3 // 4, records), driver)
            copy.restart_server()  # this one the driver has to bear
            code, said = driver.wait()
        assert code == 0, said
        assert copy.found() == copy.expected
