"""A scoring function of the user's own."""

from __future__ import annotations

from typing import Any

from verl_omni.reward_loop.item import RewardItem, ScoreError
from verl_omni.workers.config.scorers import FunctionConfig
from verl_omni.workers.config.user_function import load_function, taken_keywords


class FunctionScorer:
    """Calls the function with those keyword arguments that it takes."""

    def __init__(self, config: FunctionConfig) -> None:
        self._function = load_function(config.path, config.name)
        self._further = config.reward_kwargs
        self._taken = taken_keywords(self._function, self._further)

    def score(self, item: RewardItem) -> Any:
        """What the function returns."""
        offered = {
            "prompt": item.prompt,
            "ground_truth": item.ground_truth,
            "data_source": item.data_source,
            "extra_info": dict(item.extra_info),
            "request_id": item.request_id,
            "uid": item.uid,
            **self._further,
        }
        images = [name for name in ("image", "solution_image") if name in self._taken]
        if images:
            offered |= dict.fromkeys(images, item.pil_image())
        try:
            return self._function(**{name: offered[name] for name in self._taken})
        except StopIteration as error:  # no future can hold it
            raise ScoreError("StopIteration") from error

    async def close(self) -> None:
        """There is nothing to close."""
