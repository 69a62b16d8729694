"""What survives a stop: checkpoints, paused iterations, the ledger of consumed data, the lock, the stop request."""
