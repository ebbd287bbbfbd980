"""`make test`: all tests, in parts that run beside each other.

Much of their time Spark and the servers that are started, killed and started again wait for something, so the parts
together take little longer than the longest of them. With arguments it is pytest with these arguments.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

SPARK = ("tests/spark",)
PROCESSES = ("tests/cli", "tests/crash", "tests/end_to_end", "tests/examples", "tests/server")
STOP_SECONDS = 60
NO_TESTS = 5
"""What pytest answers when it found none, as where pyspark is not installed."""
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For a JVM that lives for some seconds: compiling well and collecting beside the work take a quarter of the CPU."""


def _stop(part: "subprocess.Popen[bytes]") -> None:
    """End a part of a run that was interrupted, in good order: it has servers of its own to stop."""
    if part.poll() is None:
        part.send_signal(signal.SIGINT)
        try:
            part.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            part.kill()


def main(arguments: list[str]) -> int:
    """Run the tests; give 0 if all passed."""
    pytest = [sys.executable, "-m", "pytest"]
    if arguments:
        return subprocess.run([*pytest, *arguments], check=False).returncode
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    root = Path(__file__).parent.parent
    environment = {**os.environ, "JDK_JAVA_OPTIONS": os.environ.get("JDK_JAVA_OPTIONS", SHORT_LIVED)}
    beside = {"With Spark": SPARK, "With processes of their own": PROCESSES}
    with ExitStack() as stack:
        parts = []
        for title, choice in beside.items():
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            command = [*pytest, *choice]
            part = stack.enter_context(
                subprocess.Popen(command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
            stack.callback(_stop, part)
            parts.append((title, output, part))
        rest = [*pytest, *(f"--ignore={path}" for path in (*SPARK, *PROCESSES))]
        codes = [subprocess.run(rest, cwd=root, env=environment, check=False).returncode]
        for title, output, part in parts:
            code = part.wait()
            codes.append(0 if code == NO_TESTS and title == "With Spark" else code)
            output.seek(0)
            sys.stdout.write(f"\n{title}, at the same time:\n{output.read()}")
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
