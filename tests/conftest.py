"""What holds for every test."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has them ignore SIGINT, nohup SIGHUP, and every child would inherit
# that: the tests of Ctrl-C and of a closed terminal need them as a terminal gives them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
