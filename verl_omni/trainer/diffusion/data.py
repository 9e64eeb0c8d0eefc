"""Training and validation prompts: which ones a step takes, and the requests made from them.

What a step gets depends on the seed and the step's number alone, so a run that is resumed needs no saved position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from verl_omni.trainer.prompts import PromptRow, check_values, read_prompts
from verl_omni.trainer.requests import make_requests
from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig
from verl_omni.workers.rollout.request import RolloutRequest

if TYPE_CHECKING:
    from verl_omni.trainer.diffusion.prompt_tokens import PromptTokenizer
    from verl_omni.trainer.diffusion.settings import TrainDataConfig

_ROLLOUT = DiffusionRolloutConfig.KEY
_ONE_IMAGE: dict[str, str | None] = {
    "num_outputs_per_prompt": f"{_ROLLOUT}.n",
    "output_type": f"{_ROLLOUT}.pipeline.output_type",
}
_ONE_BATCH: dict[str, str | None] = {
    **_ONE_IMAGE,
    "logprobs": None,
    **{name: f"{_ROLLOUT}.pipeline.{name}" for name in ("height", "width", "num_inference_steps")},
    **{name: f"{_ROLLOUT}.algo.{name}" for name in ("noise_level", "sde_type", "sde_window_size", "sde_window_range")},
}
"""What all samples of a training batch share, so that no row may set it → the key that sets it for all,
None where nothing does."""


@dataclass(frozen=True, kw_only=True)
class PromptSampler:
    """Which of `size` prompts each step takes: epoch after epoch, each prompt once at most in an epoch.

    Prompts that are left over when an epoch's last whole batch is full are not used in that epoch.
    """

    size: int
    """Number of prompts, at least `batch_size`."""
    batch_size: int
    """Prompts a step."""
    seed: int
    """Of the order."""
    shuffle: bool = True
    """Another order each epoch; False: always the order of the files."""
    steps_per_epoch: int = field(init=False)
    """Whole batches in an epoch."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps_per_epoch", self.size // self.batch_size)

    def batch_at(self, step: int) -> list[int]:
        """Indices of the prompts of `step`, which counts from 1 and may lie beyond any epoch."""
        epoch, batch = divmod(step - 1, self.steps_per_epoch)
        order: Sequence[int] = range(self.size)
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(self.size).tolist()
        return list(order[batch * self.batch_size : (batch + 1) * self.batch_size])


@dataclass(frozen=True, kw_only=True)
class TrainPrompts:
    """The training prompts and their order."""

    rows: list[PromptRow]
    """All of them, in the order of the files."""
    sampler: PromptSampler
    """Which of them a step takes."""

    @classmethod
    def read(cls, data: TrainDataConfig) -> TrainPrompts:
        """Read ``data.train_files``.

        Raises :class:`ConfigError` for what can't be read, a row that sets what all samples of a batch share, or fewer
        prompts than a batch needs.
        """
        rows = read_prompts(data.train_files, data.train_max_samples, key="data.train_files")
        _check(rows, _ONE_BATCH, "all samples of a training batch share it")
        if len(rows) < data.train_batch_size:
            raise ConfigError(
                f"data.train_batch_size={data.train_batch_size} is more than the {len(rows)} prompts of "
                f"{', '.join(data.train_files)}; write data.train_batch_size={len(rows)}"
                + ("" if data.train_max_samples is None else ", raise data.train_max_samples,")
                + " or give more prompts"
            )
        sampler = PromptSampler(size=len(rows), batch_size=data.train_batch_size, seed=data.seed, shuffle=data.shuffle)
        return cls(rows=rows, sampler=sampler)

    def batch_at(self, step: int) -> list[PromptRow]:
        """The prompts of `step`, which counts from 1."""
        return [self.rows[index] for index in self.sampler.batch_at(step)]

    def total_steps(self, *, epochs: int, limit: int | None) -> int:
        """Steps of a run: `limit`, or as many as `epochs` have where that is None."""
        return epochs * self.sampler.steps_per_epoch if limit is None else limit


def read_validation_prompts(data: TrainDataConfig) -> list[PromptRow]:
    """Read ``data.val_files``; no rows without any. Raises :class:`ConfigError`."""
    if data.val_files is None:
        return []
    rows = read_prompts(data.val_files, data.val_max_samples, key="data.val_files")
    _check(rows, _ONE_IMAGE, "a reward needs one image of each sample")
    return rows


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """One prompt of a step, and the requests for its samples."""

    uid: str
    """Unique in the run, but for validation and training of different runs."""
    row: PromptRow
    """The prompt, and what its reward needs."""
    requests: list[RolloutRequest]
    """``rollout.n`` of them, which differ in id and seed only; ids are ``<uid>-k<sample>``."""


def training_groups(
    rows: Sequence[PromptRow],
    rollout: DiffusionRolloutConfig,
    *,
    step: int,
    negative_prompt: str | None = None,
    tokenizer: PromptTokenizer | None = None,
) -> list[PromptGroup]:
    """The requests of a training step for `rows`, all prompts of that step.

    Ids are ``s<step>-p<prompt>-k<sample>``; seeds are those of :func:`make_requests` in `step`. `negative_prompt` is
    that of rows that give none. With a `tokenizer`, texts are sent as token ids.
    """
    return _groups(rows, rollout, f"s{step}", step, negative_prompt, tokenizer)


def validation_groups(
    rows: Sequence[PromptRow],
    rollout: DiffusionRolloutConfig,
    *,
    step: int,
    negative_prompt: str | None = None,
    tokenizer: PromptTokenizer | None = None,
) -> list[PromptGroup]:
    """The requests of the validation after `step` steps, sampled as ``rollout.val_kwargs`` say.

    As :func:`training_groups`, but ids begin with ``v<step>``, and seeds are the same at every step, so that images can
    be compared over a run.
    """
    return _groups(rows, rollout.for_validation(), f"v{step}", 1, negative_prompt, tokenizer)


def _groups(
    rows: Sequence[PromptRow],
    rollout: DiffusionRolloutConfig,
    prefix: str,
    seed_step: int,
    negative_prompt: str | None,
    tokenizer: PromptTokenizer | None,
) -> list[PromptGroup]:
    requests = make_requests(
        rows,
        rollout,
        negative_prompt=negative_prompt,
        step=seed_step,
        make_id=lambda row, sample: f"{prefix}-p{row:03d}-k{sample:02d}",
    )
    if tokenizer is not None:
        requests = [tokenizer.apply(request) for request in requests]
    return [
        PromptGroup(
            uid=f"{prefix}-p{index:03d}", row=row, requests=requests[index * rollout.n : (index + 1) * rollout.n]
        )
        for index, row in enumerate(rows)
    ]


def _check(rows: Sequence[PromptRow], keys: Mapping[str, str | None], why: str) -> None:
    """Raise :class:`ConfigError` if a row sets one of `keys`, or a value of another type than its key takes."""
    for row in rows:
        for key, instead in keys.items():
            if key in row.values:
                instead = f"write {instead}=… for all" if instead else "leave it out"
                raise ConfigError(f"{row.source}: {key} can't be set for one row, as {why}; {instead}")
    check_values(rows)
