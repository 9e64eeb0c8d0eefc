"""From a trajectory to the engine's output and past its post-processing, without losing a field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import DiffusionOutput


def rollout_output(
    *,
    media: Any,
    media_key: str = "image",
    trajectory_latents: Tensor | None = None,
    trajectory_log_probs: Tensor | None = None,
    trajectory_timesteps: Tensor | None = None,
    trajectory_decoded: list[Any] | None = None,
    prompt_embeddings: Mapping[str, Tensor] | None = None,
    rl: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    to_cpu: bool = True,
) -> DiffusionOutput:
    """One request's output.

    Args:
        media: uint8 pixels [n, 3, H, W] or latents [n, ...], handed on as ``payload[media_key]``.
        trajectory_latents: float32 [n, W+1, ...]; trajectory_log_probs, trajectory_timesteps: float32 [n, W].
        prompt_embeddings: unpadded tensors by name; arrives in ``multimodal_output["metadata"]["prompt_embeddings"]``.
        rl: facts about the rollout; arrives in ``multimodal_output["metadata"]["rl"]``.
        to_cpu: move tensors to the host. Each tensor then owns its storage: a pickled row carries its own bytes only.
    """
    from vllm_omni.diffusion.data import DiffusionOutput

    groups = {"prompt_embeddings": dict(prompt_embeddings or {}), "rl": dict(rl or {})}
    envelope = {"payload": {media_key: media}, "metadata": {**(metadata or {}), **groups}}
    return DiffusionOutput(
        output=owned(envelope),
        trajectory_latents=owned(trajectory_latents),
        trajectory_log_probs=owned(trajectory_log_probs),
        trajectory_timesteps=owned(trajectory_timesteps),
        trajectory_decoded=owned(trajectory_decoded),
        to_cpu=to_cpu,
    )


def with_rollout_data(
    base: DiffusionOutput,
    *,
    media_key: str = "image",
    trajectory_latents: Tensor | None = None,
    trajectory_log_probs: Tensor | None = None,
    trajectory_timesteps: Tensor | None = None,
    trajectory_decoded: list[Any] | None = None,
    prompt_embeddings: Mapping[str, Tensor] | None = None,
    rl: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    to_cpu: bool = True,
) -> DiffusionOutput:
    """`base`, as a stock pipeline returns it, with rollout data added; what is not given stays as it is."""
    added = rollout_output(
        media=base.output,
        media_key=media_key,
        trajectory_latents=trajectory_latents,
        trajectory_log_probs=trajectory_log_probs,
        trajectory_timesteps=trajectory_timesteps,
        trajectory_decoded=trajectory_decoded,
        prompt_embeddings=prompt_embeddings,
        rl=rl,
        metadata=metadata,
        to_cpu=to_cpu,
    )
    fields = ("output", "trajectory_latents", "trajectory_log_probs", "trajectory_timesteps", "trajectory_decoded")
    given = {name: value for name in fields if (value := getattr(added, name)) is not None}
    return dataclasses.replace(base, **given, to_cpu=to_cpu)


def is_rollout_output(output: object) -> bool:
    """Whether `output` is an envelope made here."""
    return isinstance(output, Mapping) and "payload" in output and "rl" in output.get("metadata", ())


def wrap_rollout_postprocessor(fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """A post-processor that lets rollout outputs through and gives everything else to `fn`.

    The engine picks its post-processor by architecture; Qwen-Image's turns pixels into PIL images, SD3's rejects an
    envelope.
    """

    def postprocess(output: Any, **kwargs: Any) -> Any:
        return output if fn is None or is_rollout_output(output) else fn(output, **kwargs)

    return postprocess


def owned(value: Any) -> Any:
    """`value`, in which a tensor or an array that is a view of something larger, or of itself, is a copy.

    Looks into mappings, lists and tuples, which come back as dicts, lists and tuples.
    """
    if isinstance(value, Tensor):
        whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        return value if whole else value.clone()
    if isinstance(value, np.ndarray):
        return value if value.base is None else value.copy()
    if isinstance(value, Mapping):
        return {key: owned(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(owned, value))
    return value
