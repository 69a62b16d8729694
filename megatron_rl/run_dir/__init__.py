"""What trainer and rollout worker share on disk: messages, the run's lock, the ledger of what was trained on."""
