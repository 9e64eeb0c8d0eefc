"""A vision-language model as judge, behind an OpenAI-compatible API (``/chat/completions``)."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

from verl_omni.reward_loop.endpoint import Endpoint
from verl_omni.reward_loop.item import RewardItem, ScoreError
from verl_omni.workers.config.scorers import TEMPLATE_FIELDS, VlmConfig

_FIELD = re.compile(r"\{(" + "|".join(TEMPLATE_FIELDS) + r")\}")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?")


class VlmScorer:
    """Asks about the image, and reads a number from the answer."""

    def __init__(self, config: VlmConfig) -> None:
        self._config = config
        self._endpoint = Endpoint(f"{config.base_url.rstrip('/')}/chat/completions", config)

    async def score(self, item: RewardItem) -> float:
        """0 to 1, from `scale`."""
        question = fill_template(self._config.prompt_template, prompt=item.prompt, ground_truth=item.ground_truth)
        reply = await self._endpoint.post(lambda: self._body(question, item))
        return read_answer(_content(reply), self._config.scale)

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()

    def _body(self, question: str, item: RewardItem) -> dict[str, Any]:
        png = item.png(self._config.max_image_bytes)
        image = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": question}]
        return {
            "model": self._config.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self._config.max_tokens,
            **self._config.extra_body,
        }


def fill_template(template: str, **values: str | None) -> str:
    """`template` with {prompt} and {ground_truth} filled in; other braces stay. Raises ScoreError if one is None."""

    def value(match: re.Match[str]) -> str:
        found = values[match[1]]
        if found is None:
            raise ScoreError(f"prompt_template asks for {{{match[1]}}}, which this prompt has not")
        return found

    return _FIELD.sub(value, template)


def read_answer(answer: str, scale: Sequence[float]) -> float:
    """The number of `answer` that lies on `scale` = [worst, best], as 0 (worst) to 1 (best).

    "/ best" and "out of best" are passed over. Raises :class:`~verl_omni.reward_loop.item.ScoreError` if there is no
    such number, or if there are several: which of them is meant, only a guess could tell.
    """
    worst, best = scale
    rest = re.sub(rf"(?:/|\bout of)\s*{best:g}\b", " ", answer, flags=re.IGNORECASE)
    numbers = {number for match in _NUMBER.finditer(rest) if worst <= (number := float(match[0])) <= best}
    if len(numbers) != 1:
        found = "no number" if not numbers else f"{len(numbers)} numbers"
        raise ScoreError(f"the answer has {found} from {worst:g} to {best:g}: {answer[:200]!r}")
    return (numbers.pop() - worst) / (best - worst)


def _content(reply: Any) -> str:
    try:
        content = reply["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        raise ScoreError("the reply has no text at choices[0].message.content; is this a chat completions API?")
    return content
