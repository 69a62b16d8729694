"""The rollout process: it plays without end, records what finishes, and follows the trainer's weights."""
