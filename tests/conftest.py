"""Settings for all tests."""

from hypothesis import settings

# A test is never timed by the clock: on a machine with other work an example may take any time.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
