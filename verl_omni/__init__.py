"""Batched diffusion rollouts for reinforcement learning, on the vLLM-Omni engine."""

__version__ = "0.1.0"
