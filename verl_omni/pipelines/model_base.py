"""Base class of rollout adapters: the denoising lifecycle of a model, written once, driven in three modes.

An adapter is a stock vLLM-Omni pipeline with this class in front of it and five hooks: turn text into token ids
(:meth:`~VllmOmniPipelineBase.text_to_ids`), encode one prompt (:meth:`~VllmOmniPipelineBase.encode`), tell the latent
shape (:meth:`~VllmOmniPipelineBase.latent_shape`), predict a velocity (:meth:`~VllmOmniPipelineBase.predict_velocity`),
decode (:meth:`~VllmOmniPipelineBase.decode`). The lifecycle is the engine's step protocol::

    prepare_encode(state) ─► [ denoise_step(all states) ─► step_scheduler(state) ] × T ─► post_decode(state)

Step-wise, the engine drives it, one step of all in-flight requests at a time. Request-level and serial,
:meth:`~VllmOmniPipelineBase.forward` drives the same methods over the requests of one batch. There is no second path.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from verl_omni.algorithms.flow_sde import row_seed
from verl_omni.pipelines.diffusion_rollout_output import rollout_output
from verl_omni.pipelines.params import ENCODERS, RequestError, RolloutParams, as_prompt, prompt_ids, prompt_text
from verl_omni.pipelines.prompt_cache import PromptCache, PromptEmbeds
from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.pipelines.rows import Forward, Rollout, RowBatch, TextBatch, rollout_of
from verl_omni.pipelines.schedule import StepTables
from verl_omni.pipelines.stats import RolloutStats

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
    from vllm_omni.diffusion.request import OmniDiffusionRequest
    from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
    from vllm_omni.diffusion.worker.utils import StepRequestState
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

logger = logging.getLogger(__name__)

Ids = tuple[int, ...]


class VllmOmniPipelineBase(AdapterRegistry):
    """Put it left of a stock pipeline class: ``class MyRollout(VllmOmniPipelineBase, StockPipeline)``."""

    supports_request_batch: ClassVar[bool] = True
    """Whether ``forward`` takes several requests; False makes the adapter step-only."""
    supports_step_execution: ClassVar[bool] = True
    """Whether the engine may drive the step methods; False makes the adapter request-only."""
    interrupt: ClassVar[bool] = False
    """Never: the engine drops an aborted request by itself, and a flag on the pipeline would stop the others too."""

    num_encoders: ClassVar[int] = 1
    """Text encoders that want token ids of their own."""
    masks_text: ClassVar[bool] = True
    """Whether the transformer takes a mask over padded text; if not, only equal text lengths share a forward."""
    cfg_key: ClassVar[str] = "true_cfg_scale"
    """The sampling parameter that holds the guidance scale."""
    default_cfg_scale: ClassVar[float] = 1.0
    default_steps: ClassVar[int] = 50
    default_text_length: ClassVar[int] = 1024
    text_limit: ClassVar[int] = 1024
    """Most text tokens that the model takes."""
    decode_rows: ClassVar[int] = 8
    """Rows that the VAE decodes at once: more gains nothing and costs memory."""
    lora_key_map: ClassVar[Mapping[str, str]] = {}
    """Module names in a PEFT adapter → their names in the engine, by suffix."""

    device: torch.device
    od_config: OmniDiffusionConfig
    transformer: Any
    vae: Any
    vae_scale_factor: int
    prepare_timesteps: Callable[..., tuple[Tensor, int]]
    scheduler: Any

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        self.stats = RolloutStats()
        self.rows_per_forward: int | None = (od_config.custom_pipeline_args or {}).get("rows_per_forward")
        self._prompts = PromptCache()
        self._batch: RowBatch | None = None
        self._tokenize = functools.lru_cache(maxsize=4096)(self.text_to_ids)
        self._tables = StepTables(self.schedule)

    # ---- hooks: what an adapter writes

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

        `size` is (height, width) in pixels, the same for all rows.
        """
        raise NotImplementedError

    def decode(self, latents: Tensor, size: tuple[int, int]) -> Tensor:
        """Images [B, 3, H, W] in -1…1 from final `latents` [B, ...] float32."""
        raise NotImplementedError

    # ---- hooks with a default

    def draw_latents(self, height: int, width: int, generator: torch.Generator) -> Tensor:
        """Initial noise of one row, of :meth:`latent_shape`, float32; the first draw from the row's generator."""
        return torch.randn(self.latent_shape(height, width), generator=generator, device=self.device)

    def guide(self, cond: Tensor, uncond: Tensor, scale: Tensor) -> Tensor:
        """Classifier-free guidance of velocities [B, ...] with one `scale` a row, [B, 1, …]."""
        return uncond + scale * (cond - uncond)

    def conditions(self, sampling: OmniDiffusionSamplingParams) -> PromptEmbeds:
        """What the transformer takes of a request beside its text, a tensor each; stacked into ``text.extra``.

        Raises :class:`RequestError`.
        """
        return {}

    def schedule(self, steps: int, image_tokens: int) -> tuple[Tensor, Tensor]:
        """Timesteps [T] in 0–1000 and sigmas [T+1] for an image of so many tokens; by default the stock pipeline's."""
        timesteps, _ = self.prepare_timesteps(steps, None, image_tokens)
        return timesteps, self.scheduler.sigmas

    def image_tokens(self, latent_shape: tuple[int, ...]) -> int:
        """Image tokens, from which a resolution-dependent schedule shifts."""
        return latent_shape[0]

    # ---- lifecycle

    def prepare_encode(self, state: StepRequestState, **kwargs: Any) -> StepRequestState:
        """Called once a request: check it, encode its prompts, draw its initial latents and windows.

        Raises :class:`RequestError` saying what to change; the engine ends this request alone.
        """
        params = RolloutParams.read(
            state.sampling,
            cfg_key=self.cfg_key,
            default_size=128 * self.vae_scale_factor,
            default_steps=self.default_steps,
            default_cfg_scale=self.default_cfg_scale,
            text_limit=self.text_limit,
            default_text_length=self.default_text_length,
        )
        shape = self.latent_shape(params.height, params.width)
        tokens = self.image_tokens(shape)
        prompt = as_prompt(state.prompt)
        cond = self._embed(prompt, params, negative=False)
        if cond is None:
            raise RequestError("the request has no prompt: give prompt (text) or prompt_token_ids")
        uncond = self._embed(prompt, params, negative=True) if params.cfg_scale > 1 else None
        own = self.conditions(state.sampling)
        latents, rows = [], []
        for i in range(params.num_outputs):
            generator = torch.Generator(device=self.device).manual_seed(row_seed(params.seed, i))
            latents.append(self.draw_latents(params.height, params.width, generator))
            rows.append(self._tables.row(params, tokens, generator))
        state.latents = torch.stack(latents)
        state.timesteps, _ = self._tables.schedule(params.num_inference_steps, tokens)
        state.step_index = 0
        state.extra["rollout"] = Rollout(
            params=params,
            rows=rows,
            cond={**cond, **own},
            uncond=None if uncond is None else {**uncond, **own},
        )
        # The engine refuses to assemble requests that differ in these; here guidance is a matter of each row.
        state.do_true_cfg, state.sampling.true_cfg_scale, state.sampling.cfg_normalize = False, None, False
        return state

    def denoise_step(
        self, input_batch: Any, *, states: Sequence[StepRequestState] | None = None, **kwargs: Any
    ) -> Tensor:
        """Called once a step for all in-flight requests: predict, guide, take the SDE step, decode those that finish.

        Returns the guided velocity [B, ...]. A forward that fails is repeated request by request, and the error goes to
        the requests that fail alone; no random number has been drawn by then.
        """
        states = list(input_batch.states if states is None else states)
        batch = self._batch
        if batch is None or not batch.stands_at(states):
            self.stats.waves += all(state.step_index == 0 for state in states)
            batch = self._batch = self.gather(states)
        velocity = self._velocity(batch)
        batch.advance(velocity)
        self._finish([state for state in states if state.step_index + 1 == state.total_steps])
        return velocity

    def step_scheduler(self, state: StepRequestState, noise_pred: Tensor | None, **kwargs: Any) -> None:
        """Called a request and step after :meth:`denoise_step`: commit the step that was taken there."""
        rollout = rollout_of(state)
        if rollout.error is not None:
            raise rollout.error
        state.latents = rollout.next_latents
        state.step_index += 1

    def post_decode(self, state: StepRequestState, **kwargs: Any) -> DiffusionOutput:
        """Called once a request after its last step: hand out pixels, trajectory and embeddings.

        Raises FloatingPointError if the image is not finite: it must not be rewarded as a black one.
        """
        rollout = rollout_of(state)
        if rollout.error is not None:
            raise rollout.error
        assert rollout.media is not None and rollout.finite is not None
        if not bool(rollout.finite.all()):
            raise FloatingPointError(
                "the latents became NaN or infinite while denoising; lower noise_level, or check weights and dtype"
            )
        embeddings = dict(rollout.cond)
        if rollout.uncond is not None:
            embeddings |= {f"negative_{name}": tensor for name, tensor in rollout.uncond.items()}
        trajectories = [trajectory for row in rollout.rows if (trajectory := row.trajectory()) is not None]
        latents, log_probs, timesteps = (
            map(torch.stack, zip(*trajectories, strict=True)) if trajectories else (None,) * 3
        )
        return rollout_output(
            media=rollout.media,
            trajectory_latents=latents,
            trajectory_log_probs=log_probs,
            trajectory_timesteps=timesteps,
            prompt_embeddings=embeddings,
            rl={
                "sde_window": [list(row.window) for row in rollout.rows],
                "true_cfg": rollout.uncond is not None,
                "seed": rollout.params.seed,
            },
        )

    def forward(self, req: OmniDiffusionRequest | DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Drive the lifecycle over whole requests: one output a request, in order; errors stay with their request."""
        from vllm_omni.diffusion.data import DiffusionOutput
        from vllm_omni.diffusion.worker.utils import StepRequestState

        states = [
            StepRequestState(request_id=r.request_id, sampling=copy.copy(r.sampling_params), prompt=r.prompt)
            for r in getattr(req, "requests", [req])
        ]
        outputs: dict[int, DiffusionOutput] = {}

        def attempt(i: int, stage: Callable[..., Any], *args: Any) -> Any:
            try:
                return stage(states[i], *args)
            except Exception as error:
                logger.debug("request %s failed", states[i].request_id, exc_info=error)
                outputs[i] = DiffusionOutput.from_exception(error)

        for i in range(len(states)):
            attempt(i, self.prepare_encode)
        shapes = {i: state.latents.shape[1:] for i, state in enumerate(states) if i not in outputs}
        for shape in dict.fromkeys(shapes.values()):
            while live := [i for i in shapes if shapes[i] == shape and i not in outputs]:
                self.denoise_step(None, states=[states[i] for i in live])
                for i in live:
                    attempt(i, self.step_scheduler, None)
                    if i not in outputs and states[i].denoise_completed:
                        outputs[i] = attempt(i, self.post_decode) or outputs[i]
        return [outputs[i] for i in range(len(states))]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """The stock pipeline's, after which no cached embedding is trusted."""
        self._prompts.clear()
        return super().load_weights(weights)  # type: ignore[misc]

    # ---- the machinery behind it

    def _embed(self, prompt: Mapping[str, Any], params: RolloutParams, *, negative: bool) -> PromptEmbeds | None:
        """Embeddings of the request's prompt or negative prompt, from the cache if it can be; None if it has none."""
        side = "negative_prompt" if negative else "prompt"
        given = [prompt_ids(prompt, negative=negative, encoder=suffix) for suffix in ENCODERS[: self.num_encoders]]
        if all(row is not None for row in given):
            ids = tuple(row for row in given if row is not None)
        elif any(row is not None for row in given):
            raise RequestError(
                f"{side}_token_ids must be given for all {self.num_encoders} text encoders, or text instead"
            )
        elif (text := prompt_text(prompt, negative=negative)) is None:
            return None
        else:
            ids = self._tokenize(text)
        limit = params.max_sequence_length
        embeds, computed = self._prompts.get((ids, limit), lambda: self.encode(ids, limit))
        self.stats.encodes_requested += 1
        self.stats.encodes_computed += computed
        return embeds

    def gather(self, states: Sequence[StepRequestState]) -> RowBatch:
        """The rows of prepared `states` of one image size, at whatever steps they stand."""
        return RowBatch(states, masks_text=self.masks_text, rows_per_forward=self.rows_per_forward)

    def _velocity(self, batch: RowBatch) -> Tensor:
        """Guided velocity [B, ...] float32. If the forward fails, each request is tried alone and may fail alone."""
        try:
            return self.guided_velocity(batch)
        except Exception as error:
            if len(batch.states) == 1:
                rollout_of(batch.states[0]).error = error
                return torch.zeros_like(batch.latents)
            logger.warning("a forward over %d requests failed, trying each alone: %s", len(batch.states), error)
        return torch.cat([self._velocity(self.gather([state])) for state in batch.states])

    def guided_velocity(self, batch: RowBatch) -> Tensor:
        """Velocity [B, ...] float32 of all rows at their current latents and timesteps, guidance applied."""
        for forward in batch.cond:
            self.stats.batch_sizes[forward.size] += 1
        cond = self._predict(batch, batch.cond)
        if not batch.uncond:
            return cond
        uncond, guided = self._predict(batch, batch.uncond), batch.guided
        if guided is None:
            return self.guide(cond, uncond, batch.cfg_scale)
        return cond.index_copy(0, guided, self.guide(cond[guided], uncond[guided], batch.cfg_scale))

    def _predict(self, batch: RowBatch, forwards: Sequence[Forward]) -> Tensor:
        """Velocity [B, ...] float32 of the rows that `forwards` cover; 0 for the others."""
        timesteps, first = batch.timesteps, forwards[0]
        if first.index is None:
            return self.predict_velocity(batch.latents, timesteps, first.text, batch.size).float()
        velocity = torch.zeros_like(batch.latents)
        for forward in forwards:
            rows = forward.index
            velocity[rows] = self.predict_velocity(
                batch.latents[rows], timesteps[rows], forward.text, batch.size
            ).float()
        return velocity

    def _finish(self, states: Sequence[StepRequestState]) -> None:
        """Make the media of requests that took their last step, all together, or each alone if that fails."""
        for kind in {rollout_of(state).params.output_type for state in states}:
            self._make_media([state for state in states if rollout_of(state).params.output_type == kind], kind)

    def _make_media(self, states: Sequence[StepRequestState], kind: str) -> None:
        rollouts = [rollout_of(state) for state in states]
        latents = torch.cat([rollout.next_latents for rollout in rollouts if rollout.next_latents is not None])
        try:
            media = latents if kind == "latent" else self._pixels(latents, rollouts[0].params)
        except Exception as error:
            if len(states) == 1:
                rollouts[0].error = rollouts[0].error or error
                return
            for state in states:
                self._make_media([state], kind)
            return
        finite = torch.isfinite(latents.flatten(1)).all(1)
        counts = [len(rollout.rows) for rollout in rollouts]
        for rollout, rows, ok in zip(rollouts, media.split(counts), finite.split(counts), strict=True):
            rollout.media, rollout.finite = rows, ok

    def _pixels(self, latents: Tensor, params: RolloutParams) -> Tensor:
        size = (params.height, params.width)
        images = [self.decode(rows, size) for rows in latents.split(self.decode_rows)]
        return torch.cat([(image.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8) for image in images])
