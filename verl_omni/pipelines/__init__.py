"""What runs inside the engine process: rollout adapters and what they share."""
