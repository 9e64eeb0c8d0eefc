"""Base class of rollout adapters: the denoising lifecycle of a model, written once, driven in three modes.

An adapter is a stock vLLM-Omni pipeline with this class in front of it and five hooks (:class:`ModelHooks`): turn text
into token ids (``text_to_ids``), encode one prompt (``encode``), tell the latent shape (``latent_shape``), predict a
velocity (``predict_velocity``), decode (``decode``). The lifecycle is the engine's step protocol::

    prepare_encode(state) ─► [ denoise_step(all states) ─► step_scheduler(state) ] × T ─► post_decode(state)

Step-wise, the engine drives it, one step of all in-flight requests at a time. Request-level and serial,
:meth:`~VllmOmniPipelineBase.forward` drives the same methods over the requests of one batch. There is no second path.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_omni.algorithms.flow_sde import row_seed
from verl_omni.pipelines.compiling import compile_modules, compile_settings
from verl_omni.pipelines.forwards import RowForwards
from verl_omni.pipelines.hooks import Ids, check_embeds, check_shape, contained
from verl_omni.pipelines.media import make_media
from verl_omni.pipelines.memory import decode_limit, give_back, is_out_of_memory
from verl_omni.pipelines.params import (
    ENCODERS,
    RequestError,
    RolloutParams,
    as_prompt,
    check_token_ids,
    prompt_ids,
    prompt_text,
)
from verl_omni.pipelines.prompt_cache import PromptCache, PromptEmbeds
from verl_omni.pipelines.registry import AdapterRegistry
from verl_omni.pipelines.rows import Rollout, rollout_of
from verl_omni.pipelines.schedule import StepTables
from verl_omni.pipelines.stats import RolloutStats
from verl_omni.pipelines.training import DiffusionModelBase
from verl_omni.pipelines.transfer import HostCopies, finished_output, results_to_host

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
    from vllm_omni.diffusion.request import OmniDiffusionRequest
    from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
    from vllm_omni.diffusion.worker.utils import StepRequestState

__all__ = ["DiffusionModelBase", "VllmOmniPipelineBase"]

logger = logging.getLogger(__name__)


class VllmOmniPipelineBase(RowForwards, AdapterRegistry):
    """Put it left of a stock pipeline class: ``class MyRollout(VllmOmniPipelineBase, StockPipeline)``."""

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        self._graphs_before = _compiled_graphs()
        self._prompts = PromptCache()
        self._host_copies = HostCopies()
        self._tokenize = functools.lru_cache(maxsize=4096)(self.text_to_ids)
        self._tables = StepTables(self.schedule)
        devices = od_config.parallel_config.vae_patch_parallel_size
        self._decodes = decode_limit(self.device, self._count_halving, devices=devices)

    # ---- lifecycle

    def prepare_encode(self, state: StepRequestState, **kwargs: Any) -> StepRequestState:
        """Called once a request: check it, encode its prompts, draw its initial latents and windows.

        Raises :class:`RequestError` saying what to change; the engine ends this request alone.
        """
        with _told(state):
            self._prepare(state)
        # The engine refuses to assemble requests that differ in these; here guidance is a matter of each row.
        state.do_true_cfg, state.sampling.true_cfg_scale, state.sampling.cfg_normalize = False, None, False
        return state

    def _prepare(self, state: StepRequestState) -> None:
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
            drawn = self.draw_latents(params.height, params.width, generator).float()
            latents.append(check_shape("draw_latents", drawn, shape))
            rows.append(self._tables.row(params, tokens, generator))
        # One empty row a row: with the latents here the engine's InputBatch would copy them four times a step, and read
        # its order back from their device, which waits for all that is queued there.
        state.latents = torch.empty(len(rows), 0)
        state.timesteps, _ = self._tables.schedule(params.num_inference_steps, tokens)
        state.step_index = 0
        state.extra["rollout"] = Rollout(
            params=params,
            rows=rows,
            latents=torch.stack(latents),
            cond={**cond, **own},
            uncond=None if uncond is None else {**uncond, **own},
        )

    def denoise_step(
        self, input_batch: Any, *, states: Sequence[StepRequestState] | None = None, **kwargs: Any
    ) -> Tensor:
        """Called once a step for all in-flight requests: predict, guide, take the SDE step, decode those that finish.

        Returns the guided velocity [B, ...]. What fails over several requests is repeated for each alone, with the same
        noise, and the error stays with those that fail alone. Where the engine has several devices, which wait for each
        other, nothing is repeated, and all keep the error.
        """
        states = list(input_batch.states if states is None else states)
        self.stats.waves += all(state.step_index == 0 for state in states)
        velocity = self.advance(states)
        ending = [state for state in states if state.step_index + 1 == state.total_steps]
        ending = [state for state in ending if rollout_of(state).error is None]
        if ending:
            with self.clock.stage("decode"), self._compiling():
                make_media(ending, self.decode, self.decode_rows, self._decodes, self.device)
            with self.clock.stage("transfer"):
                results_to_host(ending, self.device)
        if len(ending) == len(states):
            self._batch = None  # nobody comes back to it, and it holds whole-batch tensors
        return velocity

    def step_scheduler(self, state: StepRequestState, noise_pred: Tensor | None, **kwargs: Any) -> None:
        """Called a request and step after :meth:`denoise_step`: commit the step that was taken there."""
        rollout = rollout_of(state)
        if rollout.error is not None:
            raise rollout.error
        assert rollout.next_latents is not None
        rollout.latents = rollout.next_latents
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
                "the latents became NaN or infinite while denoising, or the pixels in the VAE; lower noise_level "
                f"or {self.cfg_key}, or check weights and dtype"
            )
        with _told(state), self.clock.stage("transfer"):
            return finished_output(rollout, self._host_copies)

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
                outputs[i] = DiffusionOutput.from_exception(error)

        for i in range(len(states)):
            attempt(i, self.prepare_encode)
        params = {i: rollout_of(state).params for i, state in enumerate(states) if i not in outputs}
        sizes = {i: (p.height, p.width) for i, p in params.items()}
        for size in dict.fromkeys(sizes.values()):
            while live := [i for i in sizes if sizes[i] == size and i not in outputs]:
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

    def setup_compile(self) -> None:
        """Called by the engine, unless it runs eagerly, in place of its own compilation of the same modules.

        Of what this raises the engine makes a warning, and runs on with what is compiled by then.
        """
        names = getattr(self, "_dit_modules", None) or ("transformer", "transformer_2")
        dits = [dit for name in names if (dit := getattr(self, name, None)) is not None]
        try:
            if self.device.type == "cuda":
                self.fuse()
            self._compiling = compile_settings
            compile_modules(dits, self.compiled_beside(), self.od_config, full_batch=self.decode_rows)
        except Exception:
            logger.exception("the pipeline could not be compiled and runs eagerly, in whole or in part")
            raise

    def release(self) -> None:
        """Give back the device memory of cached prompts; called before the engine sleeps, with nothing in flight.

        What errors taught about the memory is forgotten: after the sleep it may be another one.
        """
        self._prompts.clear()
        self._batch = None
        self._forwards.forget()
        self._decodes.forget()

    def read_stats(self, *, reset: bool = False) -> RolloutStats:
        """What happened since the start or the last reset; `reset` sets every counter to zero after that."""
        graphs = _compiled_graphs()
        stats = dataclasses.replace(
            self.stats, stage_s=self.clock.seconds(), compiled_graphs=graphs - self._graphs_before
        )
        if reset:
            self.stats, self._graphs_before = RolloutStats(), graphs
            self.clock.reset()
        return stats

    # ---- the machinery behind it

    def _embed(self, prompt: Mapping[str, Any], params: RolloutParams, *, negative: bool) -> PromptEmbeds | None:
        """Embeddings of the request's prompt or negative prompt, from the cache if it can be; None if it has none."""
        side = "negative_prompt" if negative else "prompt"
        for suffix in ENCODERS[self.num_encoders :]:
            if prompt.get(f"{side}_token_ids{suffix}") is not None:
                raise RequestError(
                    f"{side}_token_ids{suffix} is given, but this model has {self.num_encoders} text encoder(s)"
                )
        given = [prompt_ids(prompt, negative=negative, encoder=suffix) for suffix in ENCODERS[: self.num_encoders]]
        if all(row is not None for row in given):
            ids = tuple(row for row in given if row is not None)
            for suffix, row in zip(ENCODERS, ids, strict=False):
                check_token_ids(f"{side}_token_ids{suffix}", row, getattr(self, f"text_encoder{suffix}", None))
        elif any(row is not None for row in given):
            raise RequestError(
                f"{side}_token_ids must be given for all {self.num_encoders} text encoders, or text instead"
            )
        elif (text := prompt_text(prompt, negative=negative)) is None:
            return None
        else:
            ids = self._tokenize(text)
        limit = params.max_sequence_length
        with self.clock.stage("encode"):
            try:
                embeds, computed = self._prompts.get((ids, limit), lambda: self._encode_once_more(ids, limit))
            except RequestError as error:
                raise (RequestError(f"negative_prompt: {error}") if negative else error) from None
        self.stats.encodes_requested += 1
        self.stats.encodes_computed += computed
        return embeds

    def _encode_once_more(self, ids: tuple[Ids, ...], limit: int) -> PromptEmbeds:
        """Embeddings of one prompt; again without the cached ones where the memory is short."""
        try:
            return check_embeds(self.encode(ids, limit))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self.stats.out_of_memory += 1
        self._prompts.clear()
        give_back(self.device)
        return check_embeds(self.encode(ids, limit))


@contextlib.contextmanager
def _told(state: StepRequestState) -> Iterator[None]:
    """Log the traceback of what is no fault of the request: its error tells only the message."""
    try:
        with contained():
            yield
    except RequestError:
        raise
    except Exception:
        logger.exception("request %s failed", state.request_id)
        raise


def _compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported: then nothing was compiled
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
