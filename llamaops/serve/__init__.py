"""Run the engine: process, supervisor, relay, control."""
