"""``python -m llamaops``."""

from llamaops.cli import main

main()
