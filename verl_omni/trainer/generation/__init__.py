"""Rollouts without training: prompts in, images and recorded trajectories out."""
