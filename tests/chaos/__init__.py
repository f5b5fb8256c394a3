"""Random faults against a running llamaops with the real engine under load: ``PYTHONPATH=tests python -m chaos``."""
