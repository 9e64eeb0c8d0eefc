"""What a rollout adapter says about its model: class attributes and hooks; the rules that its training shares."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from verl_omni.pipelines.memory import block_bytes
from verl_omni.pipelines.prompt_cache import PromptEmbeds
from verl_omni.pipelines.rows import TextBatch

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

Ids = tuple[int, ...]
"""Token ids of one prompt for one encoder."""


class ModelRules:
    """What the rollout of a model and its training must do alike."""

    masks_text: ClassVar[bool] = True
    """Whether the transformer takes a mask over padded text; if not, only equal text lengths share a forward."""
    cfg_key: ClassVar[str] = "true_cfg_scale"
    """The sampling parameter that holds the guidance scale."""
    default_cfg_scale: ClassVar[float] = 1.0

    def guide(self, cond: Tensor, uncond: Tensor, scale: Tensor) -> Tensor:
        """Classifier-free guidance of velocities [B, ...] with one `scale` a row, [B, 1, …]."""
        return uncond + scale * (cond - uncond)

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Image tokens, from which a resolution-dependent schedule shifts."""
        return latent_shape[0]


class ModelHooks(ModelRules):
    """The part of an adapter that differs from model to model; the stock pipeline beside it brings the components."""

    supports_request_batch: ClassVar[bool] = True
    """Whether ``forward`` takes several requests; False makes the adapter step-only."""
    supports_step_execution: ClassVar[bool] = True
    """Whether the engine may drive the step methods; False makes the adapter request-only."""
    interrupt: ClassVar[bool] = False
    """Never: the engine drops an aborted request by itself, and a flag on the pipeline would stop the others too."""

    num_encoders: ClassVar[int] = 1
    """Text encoders that want token ids of their own."""
    default_steps: ClassVar[int] = 50
    default_text_length: ClassVar[int] = 1024
    text_limit: ClassVar[int] = 1024
    """Most text tokens that the model takes."""
    decode_rows: ClassVar[int] = 8
    """Rows that the VAE decodes at once; each more costs memory."""
    lora_key_map: ClassVar[Mapping[str, str]] = {}
    """Module names in a PEFT adapter → their names in the engine, by suffix."""

    device: torch.device
    od_config: OmniDiffusionConfig
    transformer: Any
    vae: Any
    vae_scale_factor: int
    prepare_timesteps: Callable[..., tuple[Tensor, int]]
    scheduler: Any

    # ---- what an adapter writes

    def text_to_ids(self, text: str) -> tuple[Ids, ...]:
        """Token ids of `text`, one tuple an encoder, template included, neither padded nor truncated."""
        raise NotImplementedError

    def encode(self, ids: tuple[Ids, ...], max_sequence_length: int) -> PromptEmbeds:
        """Encode one prompt alone: ``prompt_embeds`` [L, D] and any other tensor the transformer takes, unpadded.

        Raises :class:`RequestError` if the prompt is longer than `max_sequence_length` tokens.
        """
        raise NotImplementedError

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one image's latents. Raises :class:`RequestError` for a size that the model cannot make."""
        raise NotImplementedError

    def predict_velocity(self, latents: Tensor, timesteps: Tensor, text: TextBatch, size: tuple[int, int]) -> Tensor:
        """Run the transformer: `latents` [B, ...] float32, `timesteps` [B] float32 in 0–1000, → velocity [B, ...].

        `size` is (height, width) in pixels, the same for all rows. Guidance asks for rows with negative prompts too: in
        a call of their own, or where they are few in the same.
        """
        raise NotImplementedError

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """Images [B, 3, H, W] in -1…1 from final `latents` [B, ...] float32."""
        raise NotImplementedError

    # ---- what has a default

    def row_bytes(self, image_tokens: int, text_tokens: int) -> int:
        """Most bytes that the activations of one row take in a transformer forward; bounds the rows of a forward.

        By default those of a dual-stream DiT whose MLP is four times as wide as a token, by ``transformer.inner_dim``.
        A transformer without it gives 0, not known: its forwards are bounded by errors alone.
        """
        width = getattr(self.transformer, "inner_dim", 0)
        tokens, element_bytes = image_tokens + text_tokens, self.od_config.dtype.itemsize
        return block_bytes(width=width, feed_forward=4 * width, tokens=tokens, element_bytes=element_bytes)

    def draw_latents(self, height: int, width: int, generator: torch.Generator) -> Tensor:
        """Initial noise of one row, of :meth:`latent_shape`, float32; the first draw from the row's generator."""
        return torch.randn(self.latent_shape(height, width), generator=generator, device=self.device)

    def conditions(self, sampling: OmniDiffusionSamplingParams) -> PromptEmbeds:
        """What the transformer takes of a request beside its text, a tensor each; stacked into ``text.extra``.

        Raises :class:`RequestError`.
        """
        return {}

    def fuse(self) -> None:
        """Replace parts of the transformer, in place, by faster ones for CUDA; called once, before it is compiled."""

    def compiled_beside(self) -> Sequence[nn.Module]:
        """Modules of one tensor [B, ...], like the VAE's decoder, that are compiled as a whole; by default none."""
        return ()

    def schedule(self, steps: int, image_tokens: int) -> tuple[Tensor, Tensor]:
        """Timesteps [T] in 0–1000 and sigmas [T+1] for an image of so many tokens; by default the stock pipeline's."""
        timesteps, _ = self.prepare_timesteps(steps, None, image_tokens)
        return timesteps, self.scheduler.sigmas


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Turn what would end the engine's own loop, and leave every request waiting, into an error of this request."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as stop:
        raise RuntimeError(f"the adapter raised {type(stop).__name__}: {stop}") from stop


def check_shape(hook: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """`tensor`, if it has `shape`: one request's wrong answer would spoil those of its batch mates."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{hook} returned {list(tensor.shape)}, not {list(shape)}")
    return tensor


def check_embeds(embeds: PromptEmbeds) -> PromptEmbeds:
    """`embeds`, if they are what ``encode`` is to return."""
    text = embeds.get("prompt_embeds") if isinstance(embeds, dict) else None
    if not isinstance(text, Tensor) or text.ndim != 2 or not len(text):
        raise ValueError('encode returned no "prompt_embeds" of shape [L, D] with at least one token')
    return embeds
