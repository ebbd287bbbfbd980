"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# No test depends on the speed of the machine: the first draw of a strategy may take seconds where others run beside it.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
