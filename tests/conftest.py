"""Hypothesis profiles: ``quick`` by default, ``HYPOTHESIS_PROFILE=long`` for a thorough run."""

import os

from hypothesis import settings

from tests.helpers import needs  # lets the mode bf16 run on every processor

assert needs

settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
