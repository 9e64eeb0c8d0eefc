"""What is generated: prompts, sizes, guidance, and when the requests arrive. All of it follows from the seed.

A prompt is a list of random token ids, so that its length is exactly the one asked for; no two prompts are the same,
and each repeat has prompts of its own, as a step of training has. The repeats have prompts of the same lengths, so they
differ by noise alone; the warm-up has other lengths, so a graph that was compiled for its lengths only shows as a
recompile.

Arrivals: "burst" submits all requests at once. "staggered" submits them one by one: gaps are uniform between 0 and
twice their mean, which is `LOAD` of the time in which the engine frees a place, ``steps × seconds of a step / cap``. So
the requests that denoise together stand at different steps, and once the batch is full there is always one waiting. The
seconds of a step are those of the fastest burst of the same engine.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_omni.workers.rollout.request import RolloutRequest

ARRIVALS = ("burst", "staggered")
LOAD = 0.8
"""Mean gap between arrivals, of the time in which a place becomes free: below 1, so that the engine never idles."""
SERIAL_REQUESTS = 8
"""Most images in a repeat in serial mode, and of a prompt there: one by one they take long, and each takes as long as
the last."""
_IDS = (10, 200)
"""Range of the random token ids: ordinary tokens in every vocabulary, tiny ones included."""
_SEED_BITS = 32


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is usual for a model, and how its adapter reads token ids."""

    size: int = 512
    """Pixels."""
    cfg: float = 1.0
    """Guidance scale; 1 is none."""
    n: int = 8
    """Images of a prompt."""
    dropped: int = 0
    """Leading tokens, of the chat template, that the adapter drops."""
    limits: tuple[int | None, ...] = (None,)
    """Most tokens of each text encoder; None: no limit."""
    fixed: int = 0
    """Text tokens that the transformer gets beside those of the last encoder."""
    padded: int | None = None
    """The last encoder's tokens are padded to this many, or to the requests' ``max_sequence_length``; None: not."""


RECIPES = {
    "QwenImagePipeline": Recipe(cfg=4.0, n=16, dropped=34),
    "StableDiffusion3Pipeline": Recipe(size=384, limits=(77, 77, None), fixed=77, padded=256),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests of one kind, any number of them."""

    height: int
    width: int
    steps: int
    """At least 2."""
    cfg: float = 1.0
    """Guidance scale; 1 is none."""
    cfg_key: str = "true_cfg_scale"
    """The sampling parameter that the adapter reads it from."""
    n: int = 1
    """Images of a prompt, each a request."""
    text: tuple[int, int] = (64, 64)
    """Shortest and longest prompt in tokens, template not counted."""
    negative_text: int = 6
    """Tokens of the negative prompt, with guidance."""
    max_sequence_length: int | None = None
    """Limit on text tokens that requests ask for; None: none, but where a prompt is longer than `Recipe.padded`."""
    seed: int = 0
    recipe: Recipe = field(default_factory=Recipe)

    def requests(self, count: int, tag: str, *, warmup: bool = False) -> list[RolloutRequest]:
        """`count` images, with prompts and seeds that are `tag`'s own."""
        lengths = self.lengths(math.ceil(count / self.n), warmup=warmup)
        texts = [self._ids(f"{tag} {i}", length) for i, length in enumerate(lengths)]
        shared = self._shared()
        first = random.Random(f"{self.seed} seed {tag}").getrandbits(_SEED_BITS)
        return [
            RolloutRequest(
                request_id=f"{tag}-{i}",
                seed=first + i,
                **self._prompt(texts[i // self.n], "prompt_token_ids"),
                **shared,
            )
            for i in range(count)
        ]

    def lengths(self, prompts: int, *, warmup: bool = False) -> list[int]:
        """Tokens of each prompt: the same in every repeat, others in the warm-up."""
        draw = random.Random(f"{self.seed} lengths {warmup}")
        return [draw.randint(*self.text) for _ in range(prompts)]

    @property
    def text_limit(self) -> int | None:
        """``max_sequence_length`` of the requests; None: the adapter's default."""
        padded = self.recipe.padded
        longer = padded is not None and max(self.text) > padded
        return self.max_sequence_length or (max(self.text) if longer else None)

    def text_tokens(self, length: int) -> int:
        """Text tokens that the transformer gets for a prompt of `length`."""
        recipe = self.recipe
        return recipe.fixed + (length if recipe.padded is None else self.text_limit or recipe.padded)

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        names = ("height", "width", "steps", "cfg", "n", "text", "negative_text", "max_sequence_length", "seed")
        plain = {name: getattr(self, name) for name in names}
        return plain | {"text": list(self.text), "negative_text": self.negative_text if self.cfg > 1 else None}

    def _shared(self) -> dict[str, Any]:
        window = min(2, self.steps // 2)
        knobs: dict[str, Any] = dict(height=self.height, width=self.width, num_inference_steps=self.steps)
        knobs |= {"sde_window_size": window, "sde_window_range": (0, self.steps // 2), self.cfg_key: self.cfg}
        if self.cfg > 1:
            knobs |= self._prompt(self._ids("negative", self.negative_text), "negative_prompt_token_ids")
        return knobs | {"max_sequence_length": self.text_limit}

    def _ids(self, what: str, length: int) -> list[int]:
        draw = random.Random(f"{self.seed} ids {what}")
        return [draw.randrange(*_IDS) for _ in range(length)]

    def _prompt(self, ids: list[int], name: str) -> dict[str, Any]:
        """`ids` as every encoder gets them."""
        template = [_IDS[0]] * self.recipe.dropped
        return {
            f"{name}{suffix}": (template + ids)[:limit]
            for limit, suffix in zip(self.recipe.limits, ("", "_2", "_3"), strict=False)
        }


def arrival_times(count: int, *, cap: int, steps: int, step_s: float, seed: int) -> list[float]:
    """When each of `count` requests arrives, in seconds after the first, by the rule at the head of this module."""
    mean = LOAD * steps * step_s / cap
    draw = random.Random(f"{seed} arrivals")
    gaps: Sequence[float] = [draw.uniform(0, 2 * mean) for _ in range(count - 1)]
    return list(itertools.accumulate(gaps, initial=0.0))


def request_count(cap: int, n: int, waves: int) -> int:
    """Requests for at least so many waves of `cap`, in whole groups of `n`."""
    return math.ceil(waves * cap / n) * n
