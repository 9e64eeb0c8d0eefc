"""How fast rollouts are, and what their time goes into: ``python -m verl_omni.bench``."""
