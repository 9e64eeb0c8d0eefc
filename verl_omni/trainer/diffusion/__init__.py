"""Training of diffusion models by reinforcement learning."""
