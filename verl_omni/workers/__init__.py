"""Workers of a training run: typed configuration and rollouts."""
