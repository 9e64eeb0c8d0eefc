"""Entry points: what a person starts."""
