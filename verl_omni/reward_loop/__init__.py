"""Rewards of images: scorers, and their weighted sum."""

from verl_omni.reward_loop.item import RewardError, RewardItem, RewardResult
from verl_omni.reward_loop.manager import RewardManager

__all__ = ["RewardError", "RewardItem", "RewardManager", "RewardResult"]
