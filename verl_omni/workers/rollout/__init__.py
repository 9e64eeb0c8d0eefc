"""Rollouts: the plan, the engine that carries it out, requests and samples."""
