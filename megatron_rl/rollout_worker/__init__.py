"""The rollout process: plays episodes, records them and loads the weights that the trainer publishes."""
