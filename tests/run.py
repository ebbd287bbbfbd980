"""`make test`: all tests, those with Spark beside the others.

Spark spends much of its time starting and waiting, so the two halves together take little longer than one of them.
With arguments it is pytest with these arguments.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

SPARK = ("tests/spark", "tests/cli/test_pipeline.py")
NO_TESTS = 5
"""What pytest answers when it found none, as where pyspark is not installed."""


def main(arguments: list[str]) -> int:
    """Run the tests; give 0 if all passed."""
    pytest = [sys.executable, "-m", "pytest"]
    if arguments:
        return subprocess.run([*pytest, *arguments], check=False).returncode
    root = Path(__file__).parent.parent
    with tempfile.TemporaryFile("w+") as output:
        beside = subprocess.Popen([*pytest, *SPARK], cwd=root, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = subprocess.run([*pytest, *(f"--ignore={path}" for path in SPARK)], cwd=root, check=False).returncode
            spark_code = beside.wait()
        except BaseException:
            beside.kill()
            beside.wait()
            raise
        output.seek(0)
        sys.stdout.write(f"\nWith Spark, at the same time:\n{output.read()}")
    return code or (0 if spark_code == NO_TESTS else spark_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
