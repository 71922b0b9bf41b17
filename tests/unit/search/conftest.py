"""Property tests here have no time limit per example: a busy machine is not a failure."""

import os

from hypothesis import settings

settings.register_profile("search", deadline=None, max_examples=60, derandomize="CI" in os.environ)
settings.load_profile("search")
