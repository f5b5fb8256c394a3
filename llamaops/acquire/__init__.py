"""Put an artefact (engine or model) on disk and return a fact from `llamaops.core` about it."""
