"""The pages that need Spark, run as they stand there."""

import importlib.util
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, Reader, has


@pytest.mark.skipif(
    importlib.util.find_spec("pyspark") is None or not has("java"), reason="Spark and Java are not installed"
)
@pytest.mark.timeout(600)
def test_a_reader_of_the_parquet_recipe_can_do_what_it_says(tmp_path: Path) -> None:
    reader = Reader(tmp_path, seconds=250)
    try:
        reader.follow(ROOT / "docs" / "recipes" / "parquet.md")
    finally:
        reader.close()
