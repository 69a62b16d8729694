"""Files that trainer and rollout worker share: messages, the run's lock, the ledger of trained trajectories."""
