"""Render a plan for systemd, compose and Kubernetes."""
