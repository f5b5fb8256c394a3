"""What holds for every test."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has them ignore SIGINT, and every child would inherit that: the tests
# of Ctrl-C need it as a terminal gives it.
signal.signal(signal.SIGINT, signal.default_int_handler)
