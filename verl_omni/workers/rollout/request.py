"""What goes into a rollout and what comes out: one request, one sample or one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

TokenIds: TypeAlias = "Sequence[int] | Tensor"
"""A list, a 1-D tensor or a [1, L] tensor of token ids, or of a mask over them."""

ABORTED = "aborted"
"""Message of the error of a request that was aborted."""
_PROMPT, _SAMPLING, _EXTRA = ({"to": where} for where in ("prompt", "sampling", "extra_args"))


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """One prompt and its sampling knobs. None means the adapter's default.

    Values are not checked here: the adapter checks them, so that a bad one ends its own request and no other. Raises
    ValueError for an id that is no text, as without it the request could not be told of.
    """

    request_id: str
    """Unique among the requests in flight."""
    prompt: str | None = field(default=None, metadata=_PROMPT)
    """Text; not needed beside token ids."""
    prompt_token_ids: TokenIds | None = field(default=None, metadata=_PROMPT)
    """Token ids of the first text encoder."""
    prompt_token_ids_2: TokenIds | None = field(default=None, metadata=_PROMPT)
    """Token ids of the second text encoder (SD3)."""
    prompt_token_ids_3: TokenIds | None = field(default=None, metadata=_PROMPT)
    """Token ids of the third text encoder (SD3)."""
    prompt_mask: TokenIds | None = field(default=None, metadata=_PROMPT)
    """1 for the valid ones of `prompt_token_ids`; None: all are."""
    prompt_mask_2: TokenIds | None = field(default=None, metadata=_PROMPT)
    """The same for `prompt_token_ids_2`."""
    prompt_mask_3: TokenIds | None = field(default=None, metadata=_PROMPT)
    """The same for `prompt_token_ids_3`."""
    negative_prompt: str | None = field(default=None, metadata=_PROMPT)
    """Text to steer away from; guidance needs a negative prompt in one form or the other."""
    negative_prompt_token_ids: TokenIds | None = field(default=None, metadata=_PROMPT)
    """Token ids of the negative prompt, first text encoder."""
    negative_prompt_token_ids_2: TokenIds | None = field(default=None, metadata=_PROMPT)
    """Token ids of the negative prompt, second text encoder."""
    negative_prompt_token_ids_3: TokenIds | None = field(default=None, metadata=_PROMPT)
    """Token ids of the negative prompt, third text encoder."""
    negative_prompt_mask: TokenIds | None = field(default=None, metadata=_PROMPT)
    """1 for the valid ones of `negative_prompt_token_ids`; None: all are."""
    negative_prompt_mask_2: TokenIds | None = field(default=None, metadata=_PROMPT)
    """The same for `negative_prompt_token_ids_2`."""
    negative_prompt_mask_3: TokenIds | None = field(default=None, metadata=_PROMPT)
    """The same for `negative_prompt_token_ids_3`."""
    height: int | None = field(default=None, metadata=_SAMPLING)
    """Pixels."""
    width: int | None = field(default=None, metadata=_SAMPLING)
    """Pixels."""
    num_inference_steps: int | None = field(default=None, metadata=_SAMPLING)
    """Denoising steps T."""
    true_cfg_scale: float | None = field(default=None, metadata=_SAMPLING)
    """Guidance of models with true CFG (Qwen-Image)."""
    guidance_scale: float | None = field(default=None, metadata=_SAMPLING)
    """Guidance of the others (SD3)."""
    seed: int | None = field(default=None, metadata=_SAMPLING)
    """Seed of the request's rows; None draws one."""
    num_outputs_per_prompt: int = field(default=1, metadata=_SAMPLING)
    """Images n of this request."""
    max_sequence_length: int | None = field(default=None, metadata=_SAMPLING)
    """Longest prompt, in tokens."""
    output_type: str | None = field(default=None, metadata=_SAMPLING)
    """"pt": pixels; "latent": final latents, not decoded."""
    noise_level: float | None = field(default=None, metadata=_EXTRA)
    """Strength a of the stochastic steps; 0 makes them deterministic."""
    sde_type: str | None = field(default=None, metadata=_EXTRA)
    """"sde", "cps" or "dance_sde"."""
    sde_window_size: int | None = field(default=None, metadata=_EXTRA)
    """Number W of stochastic steps; None: all but the last."""
    sde_window_range: tuple[int, int] | None = field(default=None, metadata=_EXTRA)
    """[lo, hi): where the window may lie."""
    logprobs: bool = field(default=True, metadata=_EXTRA)
    """Record the trajectory and its log-probs."""

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str):
            raise ValueError(f"request_id must be text, got {self.request_id!r}")

    def to_engine(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The engine's prompt and keyword arguments of its sampling parameters; what is None is left out.

        Raises RequestError for knobs that are no plain values, and for a guidance scale that is no number: the engine
        copies the ones and compares the other before the adapter sees them.
        """
        from verl_omni.pipelines.params import check_number, plain

        groups: dict[str, dict[str, Any]] = {"prompt": {}, "sampling": {}, "extra_args": {}}
        for knob in fields(self):
            value, group = getattr(self, knob.name), knob.metadata.get("to")
            if value is not None and group is not None:
                groups[group][knob.name] = value if group == "prompt" else plain(knob.name, value)
        check_number("guidance_scale", groups["sampling"].get("guidance_scale"), 1.0)
        return groups["prompt"], {**groups["sampling"], "extra_args": groups["extra_args"]}


@dataclass(kw_only=True)
class RolloutSample:
    """What one request produced: n images, W recorded stochastic steps. Tensors are on the host, with own storage, but
    for the embeddings, which the samples of a prompt may share: they are not to be written to."""

    request_id: str
    """Id of the request."""
    images: Tensor | None
    """uint8 [n, 3, H, W]; None if latents were asked for."""
    latents: Tensor | None
    """float32 [n, ...], the final latents; None unless asked for."""
    trajectory_latents: Tensor | None
    """float32 [n, W+1, ...]; None if nothing was recorded, as are the next two."""
    trajectory_log_probs: Tensor | None
    """float32 [n, W]."""
    trajectory_timesteps: Tensor | None
    """float32 [n, W], from 0 to 1000."""
    prompt_embeddings: Mapping[str, Tensor]
    """Unpadded text embeddings by name, e.g. `prompt_embeds` [L, D]."""
    sde_windows: list[tuple[int, int]]
    """[start, stop) of the stochastic steps, one a row."""
    seed: int | None
    """The seed that was used."""
    policy_version: int
    """Version of the policy that made the sample."""
    peak_memory_mb: float
    """Peak device memory while the request ran, MiB; on a CPU the most that the worker's process ever held."""
    queue_wait_s: float | None
    """How long the request waited in its engine's queue for a place in a batch, s; None: the engine did not tell."""

    @classmethod
    def read(cls, request: RolloutRequest, output: Any, policy_version: int) -> RolloutSample:
        """Take it from the engine's output of `request`. Raises :class:`RolloutError` if that holds none."""
        if not output.images:
            aborted = output.outputs and output.outputs[0].finish_reason == "abort"
            raise RolloutError(request.request_id, ABORTED if aborted else "the engine returned no image")
        media = output.images[0]
        metadata = output.multimodal_output.get("metadata", {})
        rl = metadata.get("rl", {})
        latent = request.output_type == "latent"
        return cls(
            request_id=request.request_id,
            images=None if latent else media,
            latents=media if latent else None,
            trajectory_latents=output.trajectory_latents,
            trajectory_log_probs=output.trajectory_log_probs,
            trajectory_timesteps=output.trajectory_timesteps,
            prompt_embeddings=metadata.get("prompt_embeddings", {}),
            sde_windows=[(start, stop) for start, stop in rl.get("sde_window", [])],
            seed=rl.get("seed", request.seed),
            policy_version=policy_version,
            peak_memory_mb=output.peak_memory_mb,
            queue_wait_s=rl.get("queue_wait_s"),
        )


class RolloutError(RuntimeError):
    """A request, or a call on the engine, failed."""

    def __init__(self, request_id: str | None, message: str) -> None:
        super().__init__(message if request_id is None else f"request {request_id!r}: {message}")
        self.request_id = request_id
        """Id of the request; None if the call was about none."""
        self.message = message
        """What was wrong, without the id."""

    @property
    def aborted(self) -> bool:
        """Whether the request was ended by an abort."""
        return self.message == ABORTED

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.request_id, self.message)
