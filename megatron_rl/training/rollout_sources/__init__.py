"""Where an iteration's rollouts come from: played by the trainer, streamed from a rollout worker, or recorded."""
