"""Pure rules and values: no files, clock, sockets, environment or logging."""
