import os

from hypothesis import HealthCheck, settings

# `ci` tries the same worlds every time, `dev` (HYPOTHESIS_PROFILE=dev) new ones.
# No deadline: machines are shared.
settings.register_profile(
    "ci", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
