"""These tests run under Triton's interpreter, in a process of their own (`make test-triton`); elsewhere is none."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]

if INTERPRETED:
    from tests.triton.fixtures import *  # noqa: F403
