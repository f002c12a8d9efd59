"""Hypothesis at two strengths: HYPOTHESIS_PROFILE=fast (the default, the same examples every time) or thorough.

Neither has a deadline, nor minds slow generation: how fast a shared machine is says nothing about our code.
"""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fast", max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "thorough", max_examples=1000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real model's GGUF file, in the user's own cache; pulled if it is not there, so that no test is skipped."""
    from app import hub
    from app.settings import Settings

    return hub.pull("smollm2", cache_dir=Settings().cache_dir)
