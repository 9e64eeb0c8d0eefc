"""A scoring service of the user's own."""

from __future__ import annotations

import base64
from typing import Any

from verl_omni.reward_loop.endpoint import Endpoint
from verl_omni.reward_loop.item import RewardItem, ScoreError
from verl_omni.workers.config.scorers import HttpConfig


class HttpScorer:
    """Sends ``{request_id, prompt, ground_truth, data_source, image}``; the image is a PNG in base64."""

    def __init__(self, config: HttpConfig) -> None:
        self._key = config.score_key
        self._max_image_bytes = config.max_image_bytes
        self._endpoint = Endpoint(config.url, config)

    async def score(self, item: RewardItem) -> Any:
        """What stands under the score's key in the reply."""
        reply = await self._endpoint.post(lambda: self._body(item))
        if not isinstance(reply, dict) or self._key not in reply:
            found = f"the keys {list(reply)}" if isinstance(reply, dict) else f"a {type(reply).__name__}"
            raise ScoreError(f"the reply must be an object with the key {self._key!r}, got {found:.200}")
        value = reply[self._key]
        if not isinstance(value, (int, float)):
            raise ScoreError(f"{self._key!r} of the reply must be a number, got a {type(value).__name__}")
        return value

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()

    def _body(self, item: RewardItem) -> dict[str, Any]:
        return {
            "request_id": item.request_id,
            "prompt": item.prompt,
            "ground_truth": item.ground_truth,
            "data_source": item.data_source,
            "image": base64.b64encode(item.png(self._max_image_bytes)).decode(),
        }
