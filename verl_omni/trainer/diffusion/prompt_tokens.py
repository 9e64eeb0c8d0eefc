"""Prompts tokenized by the trainer, with the rule and the tokenizers that the rollout would use itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from verl_omni.pipelines.hooks import Ids, ModelHooks
from verl_omni.pipelines.params import ENCODERS
from verl_omni.workers.config import ConfigError, DiffusionModelConfig
from verl_omni.workers.rollout.request import RolloutRequest

_KEY = f"{DiffusionModelConfig.KEY}.extra_tokenizers"


class PromptTokenizer:
    """Gives requests the token ids of their texts.

    The rule is the adapter's ``text_to_ids``, run on the model's diffusers pipeline without its weights, which has what
    the rule reads: the tokenizers, their length limits, the chat template.
    """

    def __init__(self, rule: Callable[[str], tuple[Ids, ...]]) -> None:
        self._rule = functools.lru_cache(maxsize=4096)(rule)

    @classmethod
    def load(cls, model: DiffusionModelConfig, adapter: type[ModelHooks]) -> PromptTokenizer:
        """For ``model.extra_tokenizers``. Reads (or downloads) the model's tokenizers only.

        Raises :class:`ConfigError` if these are not the tokenizers of `adapter`'s further text encoders, or if its rule
        needs more than tokenizers.
        """
        further = [f"tokenizer{suffix}" for suffix in ENCODERS[1 : adapter.num_encoders]]
        if model.extra_tokenizers != further:
            instead = f"[{', '.join(further)}]" if further else "null"
            raise ConfigError(
                f"{_KEY}={model.extra_tokenizers}: {adapter.__name__} has {adapter.num_encoders} text encoder(s); "
                f"write {_KEY}={instead}"
            )
        try:
            pipeline: Any = _weightless_pipeline(model.path)
            rule = functools.partial(adapter.text_to_ids, pipeline)
            rule("a prompt")
        except Exception as error:  # the libraries raise many kinds
            raise ConfigError(
                f"{_KEY}: the trainer can't tokenize for {model.path}: {type(error).__name__}: {error}; "
                f"write {_KEY}=null, and the rollout does"
            ) from error
        return cls(rule)

    def apply(self, request: RolloutRequest) -> RolloutRequest:
        """`request` with token ids of its prompt and negative prompt; a side without text, or with ids, stays as it is.

        Texts that are no strings are left to the adapter to reject.
        """
        ids: dict[str, list[int]] = {}
        for side in ("prompt", "negative_prompt"):
            text = getattr(request, side)
            given = any(getattr(request, f"{side}_token_ids{suffix}") is not None for suffix in ENCODERS)
            if isinstance(text, str) and not given:
                for suffix, row in zip(ENCODERS, self._rule(text), strict=False):
                    ids[f"{side}_token_ids{suffix}"] = list(row)
        changed: dict[str, Any] = ids
        return dataclasses.replace(request, **changed)


def _weightless_pipeline(path: str) -> Any:
    """The diffusers pipeline of the model at `path` with its tokenizers and nothing else."""
    import diffusers

    index = diffusers.DiffusionPipeline.load_config(path)
    parts = {name for name, value in index.items() if isinstance(value, list)}
    return diffusers.DiffusionPipeline.from_pretrained(
        path, **{name: None for name in parts if not name.startswith("tokenizer")}
    )
