"""Who plays them: one episode as a state machine, many in lock step, many at once."""
