"""What holds for all tests."""

import faulthandler
import signal

from hypothesis import HealthCheck, settings

EXIT_SECONDS = 120
"""How long pytest may take to be gone after its last test."""

# A run that was started in the background ignores Ctrl+C, and so would every process that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on the speed of the machine: the first draw of a strategy may take seconds where others run beside it.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_unconfigure() -> None:
    """Let no thread that a failed test left behind keep the run for ever: it is shown, and the run ends as failed."""
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
