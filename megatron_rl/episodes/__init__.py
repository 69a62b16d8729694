"""Playing episodes with an engine: one episode as a state machine, many in lock step, many concurrently."""
