"""What of the objective is wired to a run: estimators, removal and correction, losses of one step, controllers."""
