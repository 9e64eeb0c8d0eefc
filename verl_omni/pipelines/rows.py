"""Rows in flight: what each request carries, and the batch of all rows that step together.

A row is one image of one request. :class:`Rollout` is what a request keeps between steps; it lives in
``state.extra["rollout"]``, out of reach of the engine's own padding and mixing rules. :class:`RowBatch` holds the rows
of several requests as whole-batch tensors. It is built when requests join or leave and otherwise only moved on, so a
step costs a fixed number of tensor operations, but for one noise draw a stochastic row, and reads nothing back to the
host.

Shapes: B rows, n rows of one request, T steps, L text tokens, ``...`` the latent dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_omni.algorithms.flow_sde import SDEStep, StepCoefficients, sde_step
from verl_omni.pipelines.params import RolloutParams
from verl_omni.pipelines.prompt_cache import PromptEmbeds
from verl_omni.pipelines.queued import to_device

if TYPE_CHECKING:
    from vllm_omni.diffusion.worker.utils import StepRequestState

FUSED_GUIDANCE_TOKENS = 8192
"""Up to as many tokens of image and text, both velocities of guidance come from one forward. So few do not keep a GPU
busy while the next kernels are launched; with more, the padding of the shorter text costs more than that saves
(docs/perf/rollout.md)."""


@dataclass(kw_only=True)
class Row:
    """One image: its randomness, its schedule, and what has been recorded of its trajectory."""

    generator: torch.Generator
    window: tuple[int, int]
    table: Tensor
    """[T, 7] float32 on the host: timestep, then the fields of :class:`StepCoefficients`."""
    stochastic: Sequence[bool]
    """[T]: whether the step draws noise."""
    record: bool
    latents: list[Tensor] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    drawn: Tensor | None = None
    """Noise of a step that is not taken yet: where it must be repeated, nothing is drawn again."""

    def trajectory(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Latents [W+1, ...], log-probs [W], timesteps [W] of the W recorded steps, float32; None if there are none."""
        if not self.steps:
            return None
        return torch.stack(self.latents), torch.stack(self.log_probs), self.table[self.steps, 0]


@dataclass(kw_only=True)
class Rollout:
    """What a request carries from ``prepare_encode`` to ``post_decode``."""

    params: RolloutParams
    rows: list[Row]
    latents: Tensor
    """[n, ...] float32, at the step where the request stands."""
    cond: PromptEmbeds
    uncond: PromptEmbeds | None
    """None: no guidance for this request."""
    next_latents: Tensor | None = None
    """[n, ...]: taken in ``denoise_step``, committed in ``step_scheduler``."""
    media: Tensor | None = None
    """[n, 3, H, W] uint8, or the final latents; there once the last step is taken, and on the host after that."""
    finite: Tensor | None = None
    """[n] bool, where `media` is: whether the final latents, and their pixels, are finite."""
    error: Exception | None = None
    """Set when the shared forward or decode failed for this request alone; raised by the next per-request stage."""


def rollout_of(state: StepRequestState) -> Rollout:
    """The rollout that ``prepare_encode`` left on `state`."""
    return state.extra["rollout"]


def count_rows(states: Sequence[StepRequestState], *, guided: bool = False) -> int:
    """Rows of prepared `states`; with `guided`, those that have a second velocity."""
    rollouts = [rollout_of(state) for state in states]
    return sum(len(rollout.rows) for rollout in rollouts if not guided or rollout.uncond is not None)


def text_lengths(states: Sequence[StepRequestState]) -> list[int]:
    """Text tokens of all prompts and negative prompts of prepared `states`."""
    rollouts = [rollout_of(state) for state in states]
    return [len(text["prompt_embeds"]) for r in rollouts for text in (r.cond, r.uncond) if text is not None]


def fuses_guidance(states: Sequence[StepRequestState], *, image_tokens: int) -> bool:
    """Whether prepared `states`, with `image_tokens` a row, are so few that both velocities share a forward."""
    guided = count_rows(states, guided=True)
    tokens = (count_rows(states) + guided) * (image_tokens + max(text_lengths(states)))
    return guided > 0 and tokens <= FUSED_GUIDANCE_TOKENS


@dataclass(frozen=True, kw_only=True)
class TextBatch:
    """Text conditioning of the rows of one transformer forward."""

    embeds: Tensor
    """[B, L, D], padded with zeros on the right."""
    mask: Tensor | None
    """[B, L] bool, true on valid tokens; None when no row is padded."""
    extra: dict[str, Tensor]
    """The other tensors of the prompts, stacked to [B, ...]."""

    @classmethod
    def collate(cls, prompts: Sequence[PromptEmbeds]) -> TextBatch:
        """Pad and stack prompts whose other tensors agree in shape."""
        embeds = [prompt["prompt_embeds"] for prompt in prompts]
        lengths = [len(e) for e in embeds]
        mask = None
        if min(lengths) == max(lengths):
            padded = torch.stack(embeds)
        else:
            padded = torch.nn.utils.rnn.pad_sequence(embeds, batch_first=True)
            valid = to_device(torch.tensor(lengths), padded.device)
            mask = torch.arange(max(lengths), device=padded.device) < valid[:, None]
        names = [name for name in prompts[0] if name not in ("prompt_embeds", "prompt_embeds_mask")]
        return cls(embeds=padded, mask=mask, extra={name: torch.stack([p[name] for p in prompts]) for name in names})


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The b rows that go through the transformer together."""

    rows: Sequence[int]
    """Their positions among all rows to be predicted."""
    index: Tensor | slice
    """The same for tensors on the device; a slice where they follow each other."""
    prompts: Sequence[PromptEmbeds]
    text: TextBatch

    @classmethod
    def of(cls, rows: Sequence[int], prompts: Sequence[PromptEmbeds]) -> Forward:
        """The forward over `rows`, whose prompts are `prompts`."""
        run, device = range(rows[0], rows[0] + len(rows)), prompts[0]["prompt_embeds"].device
        index = slice(run.start, run.stop) if list(rows) == list(run) else to_device(torch.tensor(rows), device)
        return cls(rows=rows, index=index, prompts=prompts, text=TextBatch.collate(prompts))

    def __len__(self) -> int:
        return len(self.rows)

    def split(self, rows: int, /) -> list[Forward]:
        """The same in forwards of `rows` rows, texts padded to the longest of each."""
        starts = range(0, len(self), rows)
        return [Forward.of(self.rows[k : k + rows], self.prompts[k : k + rows]) for k in starts]


def plan_forwards(
    prompts: Sequence[PromptEmbeds], *, first: int = 0, masks_text: bool, rows_per_forward: int | None
) -> list[Forward]:
    """Split the rows with these `prompts`, the first of which has position `first`, into forwards.

    A model that takes no text mask gets rows of one text length at a time; `rows_per_forward` bounds each forward.
    """
    groups: dict[int, list[tuple[int, PromptEmbeds]]] = {}
    for i, prompt in enumerate(prompts, first):
        groups.setdefault(0 if masks_text else len(prompt["prompt_embeds"]), []).append((i, prompt))
    forwards = []
    for group in groups.values():
        limit = rows_per_forward or len(group)
        for k in range(0, len(group), limit):
            rows, texts = zip(*group[k : k + limit], strict=True)
            forwards.append(Forward.of(rows, texts))
    return forwards


class RowBatch:
    """All rows of `states`, gathered. `states` share one image size; steps, windows, guidance and texts may differ.

    To be predicted are the B rows with their prompts and, after them, the G guided ones with their negative prompts; in
    forwards of their own, or with `fuse_guidance` in the same.
    """

    def __init__(
        self,
        states: Sequence[StepRequestState],
        *,
        masks_text: bool,
        rows_per_forward: int | None,
        fuse_guidance: bool,
    ) -> None:
        self.states = list(states)
        rollouts = [rollout_of(state) for state in states]
        self.size = (rollouts[0].params.height, rollouts[0].params.width)
        self.rows = [row for rollout in rollouts for row in rollout.rows]
        self.spans = _spans([len(rollout.rows) for rollout in rollouts])
        self.latents = torch.cat([rollout.latents for rollout in rollouts])
        device = self.latents.device
        self._steps = [state.step_index for state in states for _ in rollout_of(state).rows]
        self._lockstep = len(set(self._steps)) == 1
        self._position = to_device(torch.tensor(self._steps), device)
        self._order = torch.arange(len(self.rows), device=device)
        tables = [row.table for row in self.rows]
        self._table = to_device(torch.nn.utils.rnn.pad_sequence(tables, batch_first=True), device)

        cond = [rollout.cond for rollout in rollouts for _ in rollout.rows]
        uncond = {
            i: rollout.uncond
            for rollout, span in zip(rollouts, self.spans, strict=True)
            if rollout.uncond is not None
            for i in range(*span)
        }
        plan = functools.partial(plan_forwards, masks_text=masks_text, rows_per_forward=rows_per_forward)
        negatives = list(uncond.values())
        self.forwards = plan([*cond, *negatives]) if fuse_guidance else [*plan(cond), *plan(negatives, first=len(cond))]
        self.guided: slice | Tensor = slice(None)
        """[G], the guided rows; a slice if all are."""
        if len(uncond) < len(cond):
            self.guided = to_device(torch.tensor(list(uncond), dtype=torch.long), device)
        scales = [rollout.params.cfg_scale for rollout in rollouts for _ in rollout.rows]
        shape = (-1,) + (1,) * (self.latents.ndim - 1)
        self.cfg_scale = to_device(torch.tensor([scales[i] for i in uncond]), device).view(shape)

    def stands_at(self, states: Sequence[StepRequestState]) -> bool:
        """Whether these very requests, at the steps where this batch left them, come next."""
        return len(states) == len(self.states) and all(
            mine is theirs and theirs.step_index == self._steps[start]
            for mine, theirs, (start, _) in zip(self.states, states, self.spans, strict=True)
        )

    def _now(self) -> tuple[Tensor, ...]:
        now = self._table[:, self._steps[0]] if self._lockstep else self._table[self._order, self._position]
        return now.unbind(1)

    @property
    def timesteps(self) -> Tensor:
        """[B] float32 in 0–1000, at full precision."""
        return self._now()[0]

    @property
    def coefficients(self) -> StepCoefficients:
        """Of each row's next step, [B] float32 each."""
        return StepCoefficients(*self._now()[1:])

    def advance(self, velocity: Tensor) -> None:
        """Take one step for every row with `velocity` [B, ...], record it, and hand each request its next latents."""
        active = [i for i, (row, step) in enumerate(zip(self.rows, self._steps, strict=True)) if row.stochastic[step]]
        step = sde_step(self.latents, velocity, self.coefficients, noise=self._noise(active))
        for i in active:
            self.rows[i].drawn = None
        self._record(active, step)
        for state, (start, stop) in zip(self.states, self.spans, strict=True):
            rollout_of(state).next_latents = step.next_latents[start:stop]
        self.latents = step.next_latents
        self._steps = [i + 1 for i in self._steps]
        if not self._lockstep:
            self._position += 1

    def _noise(self, active: list[int]) -> Tensor | None:
        if not active:
            return None
        make = torch.empty_like if len(active) == len(self.rows) else torch.zeros_like
        noise = make(self.latents)
        for i in active:
            row = self.rows[i]
            row.drawn = noise[i].normal_(generator=row.generator) if row.drawn is None else noise[i].copy_(row.drawn)
        return noise

    def _record(self, active: list[int], step: SDEStep) -> None:
        recorded = [i for i in active if self.rows[i].record]
        if not recorded:
            return
        before, after, log_prob = self.latents.unbind(), step.next_latents.unbind(), step.log_prob.unbind()
        for i in recorded:
            row = self.rows[i]
            if not row.latents:
                row.latents.append(before[i])
            row.latents.append(after[i])
            row.log_probs.append(log_prob[i])
            row.steps.append(self._steps[i])


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    spans, start = [], 0
    for length in lengths:
        spans.append((start, start + length))
        start += length
    return spans
