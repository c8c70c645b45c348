"""Settings of every test: one compute thread, and hypothesis profiles chosen by HYPOTHESIS_PROFILE."""

import os

# Before anything imports torch: processes share the cores, and threads of several processes would fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from hypothesis import HealthCheck, settings

# The machine is shared, so time says nothing about an example.
settings.register_profile(
    "default", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=2000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
