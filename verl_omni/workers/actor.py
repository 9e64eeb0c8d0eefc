"""The training worker: one process a device, driven through verl's worker group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_omni.utils.imports import without_collecting

with without_collecting():
    import ray
    import torch
    from tensordict import TensorDict
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
    from verl.utils.device import get_device_name
    from verl.utils.distributed import initialize_global_process_group_ray

    from verl_omni.workers.config import DiffusionModelConfig, FSDPDiffusionActorConfig
    from verl_omni.workers.engine.fsdp_diffusion import DiffusionFSDPEngine, PolicyState
    from verl_omni.workers.engine.lora import write_lora
    from verl_omni.workers.engine.policy_update import PolicyUpdate, recorded_log_probs
    from verl_omni.workers.rollout.external_lib import import_external_lib
    from verl_omni.workers.rollout.wire import buckets, pack

BUCKET_BYTES = 2**30
"""Of weights in one object of Ray's store: large enough to be read at full speed, small beside the store."""
_MESH = "actor"
_BY_ROWS = make_nd_compute_dataproto_dispatch_fn(mesh_name=_MESH)


def _first(worker_group: Any, results: Sequence[DataProto]) -> DataProto:
    """Collects what is the same on all ranks; verl would make lists of metrics."""
    return results[0]


@dataclass(frozen=True, kw_only=True)
class ActorWorkerConfig:
    """What a training worker is started with."""

    model: DiffusionModelConfig
    """The model, and what of it is trained."""
    actor: FSDPDiffusionActorConfig
    """How."""
    log_prob_micro_batch_size: int
    """Rows of one forward in :meth:`DiffusionActorWorker.compute_log_prob`."""
    optimizer_steps: int
    """Of the whole run: where a cosine schedule ends."""
    seed: int = 42
    """Of the new LoRA."""
    external_lib: str | None = None
    """Module or .py file that registers training models and losses; None: none."""


class DiffusionActorWorker(Worker):
    """Trains the policy. All calls go to all ranks; batches are cut into equal parts, one a rank.

    Batches are described in :func:`verl_omni.trainer.diffusion.batch.make_batch` and ordered by ``deal`` there. Their
    ``meta_info`` holds height, width, num_inference_steps, noise_level, sde_type, and mini_batch_size in samples over
    all ranks.
    """

    def __init__(self, config: ActorWorkerConfig) -> None:
        super().__init__()
        self._config = config
        # verl's own choice on the CPU would be "cpu:gloo,cpu:gloo", which torch refuses
        initialize_global_process_group_ray(backend="gloo" if get_device_name() == "cpu" else None)
        self._register_dispatch_collect_info(_MESH, dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model. Raises ValueError if its architecture is not registered, or has no modules for the LoRA."""
        config = self._config
        if config.external_lib is not None:
            import_external_lib(config.external_lib)
        torch.manual_seed(config.seed)
        self.engine = DiffusionFSDPEngine(
            model=config.model, actor=config.actor, seed=config.seed, optimizer_steps=config.optimizer_steps
        )
        self.engine.initialize()
        self._update = PolicyUpdate(engine=self.engine, config=config.actor)

    @register(dispatch_mode=_BY_ROWS)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """``old_log_probs`` float32 [B, W]: the recorded steps' log-probs under the policy as it is now."""
        log_probs = recorded_log_probs(
            self.engine,
            dict(data.batch.items()),
            self.engine.knobs(data.meta_info),
            mini_batch_size=self._mini_batch_size(data),
            micro_batch_size=self._config.log_prob_micro_batch_size,
        )
        return DataProto(batch=TensorDict({"old_log_probs": log_probs}, batch_size=[len(log_probs)]))

    @register(dispatch_mode={**_BY_ROWS, "collect_fn": _first})
    def update_actor(self, data: DataProto) -> DataProto:
        """Update the policy; see :class:`PolicyUpdate`.

        `data` holds ``old_log_probs`` and ``advantages`` too. Returns floats under ``actor/``, as
        ``meta_info["metrics"]``.
        """
        metrics = self._update.run(
            dict(data.batch.items()), self.engine.knobs(data.meta_info), mini_batch_size=self._mini_batch_size(data)
        )
        return DataProto(meta_info={"metrics": {f"actor/{name}": value for name, value in metrics.items()}})

    def _mini_batch_size(self, data: DataProto) -> int:
        """Of this rank."""
        size, rest = divmod(data.meta_info["mini_batch_size"], self.world_size)
        if rest:
            raise ValueError(
                f"mini_batch_size={data.meta_info['mini_batch_size']} samples cannot be spread over "
                f"{self.world_size} ranks; pad with samples of sample_weight 0"
            )
        return size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Trained weights, optimizer, learning rate and random numbers."""
        self.engine.save_checkpoint(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Go on from :meth:`save_checkpoint`, whatever the number of ranks was. Raises ValueError if none is there."""
        self.engine.load_checkpoint(folder, del_local_after_load=False)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_lora(self, folder: str) -> None:
        """The LoRA for PEFT, the rollout engine and diffusers' ``load_lora_weights``. Raises ValueError without one."""
        if self._config.model.lora_rank == 0:
            raise ValueError("all weights are trained, there is no LoRA to save; use save_checkpoint")
        state = self.engine.policy_state()
        if state is not None and len(state) == 3:
            _, config, tensors = state
            write_lora(folder, config, tensors)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_transformer(self, folder: str) -> None:
        """All weights for diffusers' ``from_pretrained``. Raises ValueError where a LoRA is trained."""
        if self._config.model.lora_rank:
            raise ValueError("a LoRA is trained, the transformer is as it was; use save_lora")
        self.engine.save_transformer(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def policy_state(self) -> PolicyState | tuple[str, list[ray.ObjectRef]] | None:
        """The policy for the rollout servers, from rank 0; None from the others. See :data:`PolicyState`.

        All weights are too much to be handed around: they go into Ray's object store, and references are returned.
        """
        state = self.engine.policy_state()
        if state is None or state[0] == "lora":
            return state
        return "weights", [ray.put(pack(bucket)) for bucket in buckets(state[1], BUCKET_BYTES)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def onload(self) -> None:
        """Take the device back after :meth:`offload`. What is kept on the host while not in use stays there."""
        keep_model, keep_optimizer = self.engine.is_param_offload_enabled, self.engine.is_optimizer_offload_enabled
        self.engine.to(get_device_name(), model=not keep_model, optimizer=not keep_optimizer, grad=not keep_model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """Leave the device to others: weights and optimizer go to host memory."""
        self.engine.to("cpu")
