"""The processes of a training run: Ray, the training workers, the rollout servers."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
import tempfile
import warnings
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.platforms import verl_cpu_environment
from verl_omni.trainer.diffusion.capacity import needs
from verl_omni.trainer.diffusion.errors import TrainingError
from verl_omni.trainer.diffusion.ray_join import check_answers
from verl_omni.utils.secrets import is_secret_variable
from verl_omni.workers.config import ConfigError

if TYPE_CHECKING:
    from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

    from verl_omni.trainer.diffusion.job import TrainingJob
    from verl_omni.trainer.diffusion.settings import TrainerConfig
    from verl_omni.workers.rollout.replicas import Placement, RolloutReplicas

_PASSED_ON = ("HF_", "VERL_", "VLLM_", "DIFFUSION_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "TORCH_", "RAY_AUTH_MODE")
"""How the environment variables begin that the processes of a run get from this one.

Ray writes what it passes on into its logs, so tokens are not among it. Processes of a Ray that this one starts inherit
them; on other clusters they are to be set where Ray is started.
"""

_CHATTY = ("verl.workers.engine", "torch.distributed.fsdp._fully_shard._fsdp_state", "peft.mapping_func")
"""Modules that warn in every process of every run: of engines that are not installed, of what we don't do."""


def prepare_process(device: str, *, own_ray: bool = False) -> None:
    """Set what Ray, verl and vLLM read when they are imported or started; call before that.

    Ray listens at all addresses of the machine, which can't be changed: with `own_ray`, a Ray that this process starts
    answers only to those that have its token, which are the processes it starts.
    """
    if own_ray and not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else Ray writes a token into the home folder
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARNING")
    if device == "cpu":
        os.environ.update(verl_cpu_environment())
    for module in _CHATTY:
        warnings.filterwarnings("ignore", category=UserWarning, module=re.escape(module))
    present = [item for item in os.environ.get("PYTHONWARNINGS", "").split(",") if item]
    ignored = [f"ignore::UserWarning:{module}" for module in _CHATTY]
    os.environ["PYTHONWARNINGS"] = ",".join(dict.fromkeys([*present, *ignored]))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is running."""

    actors: RayWorkerGroup
    """The training workers."""
    replicas: RolloutReplicas
    """The rollout servers."""

    @classmethod
    @asynccontextmanager
    async def running(cls, job: TrainingJob) -> AsyncIterator[Cluster]:
        """Start everything, and end it afterwards. Workers on a GPU that servers share have left it to these.

        Raises :class:`ConfigError` if the Ray cluster is too small for the run, before anything is placed on it.
        """
        import ray

        owns_ray = _start_ray(job)
        pool = _resource_pool(job)
        replicas: RolloutReplicas | None = None
        meeting = Path(tempfile.gettempdir()) / f"verl_omni_{secrets.token_hex(16)}"
        try:
            _check_room(job)
            actors = await asyncio.to_thread(_start_actors, job, pool, meeting)
            if job.colocated and job.device != "cpu":  # one after the other: a device may not hold both while they load
                await asyncio.to_thread(_load, actors)
                await asyncio.to_thread(actors.offload)
                replicas = await _start_replicas(job, pool)
            else:
                replicas = await _load_side_by_side(actors, _start_replicas(job, pool))
            yield cls(actors=actors, replicas=replicas)
        finally:
            if replicas is not None:
                await replicas.close()
            for group in pool.pgs or ():
                ray.util.remove_placement_group(group)  # ends the workers in it
            if owns_ray:
                ray.shutdown()
            meeting.unlink(missing_ok=True)


async def _load_side_by_side(actors: RayWorkerGroup, starting: Coroutine[Any, Any, RolloutReplicas]) -> RolloutReplicas:
    """Load the models of workers and servers; the first to fail ends it."""
    loading = asyncio.create_task(asyncio.to_thread(_load, actors))
    serving = asyncio.create_task(starting)
    await asyncio.wait((loading, serving), return_when=asyncio.FIRST_EXCEPTION)
    problem = next((error for task in (loading, serving) if task.done() and (error := task.exception())), None)
    if problem is None:
        return serving.result()
    serving.cancel()
    _, replicas = await asyncio.gather(loading, serving, return_exceptions=True)
    if not isinstance(replicas, BaseException):
        await replicas.close()
    raise problem


def _load(actors: RayWorkerGroup) -> None:
    """Load the workers' model. Raises :class:`ConfigError` as a worker raised it: Ray would add its traceback."""
    import ray

    try:
        actors.init_model()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise error.cause from None
        raise


def ray_address(trainer: TrainerConfig) -> str | None:
    """Of the Ray that a run joins; "local": one of its own; None: what ``RAY_ADDRESS`` says.

    Unless the configuration or the environment names one, a run on several machines joins the cluster of this machine,
    and one on a single machine starts its own.
    """
    if "address" in trainer.ray_kwargs:
        address: str | None = trainer.ray_kwargs["address"]
        return address
    if "RAY_ADDRESS" in os.environ:
        return None
    return "auto" if trainer.nnodes > 1 else "local"


def _start_ray(job: TrainingJob) -> bool:
    """Join the Ray that there is for this run, or start one; False: this process had joined one before."""
    import ray

    if ray.is_initialized():
        return False
    options = {"address": ray_address(job.settings.trainer), **job.settings.trainer.ray_kwargs}
    if options["address"] == "local":
        options.setdefault("include_dashboard", False)
        if job.device == "cpu":  # each process counts as one CPU; there may be more of them than cores
            needed = needs(job.settings, job.device)[-1].total
            options.setdefault("num_cpus", max(os.cpu_count() or 1, needed))
    try:
        check_answers(options["address"])
        ray.init(**{"logging_level": logging.WARNING, **options})
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray to join (address {options['address'] or os.environ['RAY_ADDRESS']}): {error}; start one on each "
            "machine (ray start), or write trainer.nnodes=1 for a run on this machine alone"
        ) from error
    return True


def _check_room(job: TrainingJob) -> None:
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for need in needs(job.settings, job.device):
        need.check([resources.get(need.kind, 0) for resources in machines], cluster=True)


def _environment() -> dict[str, str]:
    quiet = {"TQDM_DISABLE": "1"}  # bars of other processes would tear up the console
    passed = (name for name in os.environ if name.startswith(_PASSED_ON) and not is_secret_variable(name))
    return quiet | {name: os.environ[name] for name in passed}


def _resource_pool(job: TrainingJob) -> RayResourcePool:
    from verl.single_controller.ray import RayResourcePool

    trainer = job.settings.trainer
    return RayResourcePool(
        [trainer.n_gpus_per_node] * trainer.nnodes,
        use_gpu=job.device != "cpu",
        max_colocate_count=job.settings.processes_per_device,
    )


def _rendezvous(trainer: TrainerConfig, meeting: Path) -> dict[str, str]:
    """How the training workers find each other: through the file `meeting` if they are all on this machine.

    Else, as they would by themselves, through a port of the first one, which listens at all its addresses.
    """
    if trainer.nnodes > 1 or ray_address(trainer) != "local":
        return {}
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if "lo" in (name for _, name in socket.if_nameindex()) else {}
    return {"DIST_INIT_METHOD": meeting.as_uri(), **loopback}


def _start_actors(job: TrainingJob, pool: RayResourcePool, meeting: Path) -> RayWorkerGroup:
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

    from verl_omni.workers.actor import DiffusionActorWorker

    arguments = RayClassWithInitArgs(ray.remote(DiffusionActorWorker), config=job.actor_config())
    return RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=arguments,
        device_name=job.device,
        worker_env=_environment() | _rendezvous(job.settings.trainer, meeting),
    )


async def _start_replicas(job: TrainingJob, pool: RayResourcePool) -> RolloutReplicas:
    from verl_omni.workers.rollout.replicas import RolloutReplicas
    from verl_omni.workers.rollout.server import ServerSettings

    model, rollout = job.settings.actor_rollout_ref.model, job.settings.actor_rollout_ref.rollout
    settings = ServerSettings(
        model_path=model.path,
        plan=job.setup.plan,
        adapter=job.setup.adapter_path,
        dtype=rollout.dtype,
        engine_kwargs=rollout.engine_options(),
        external_lib=rollout.external_lib,
        merge_lora=rollout.merge_lora,
        colocated=job.colocated,
    )
    try:
        return await RolloutReplicas.start(
            settings,
            _placements(job, pool),
            env_vars=_environment(),
            start_timeout_s=rollout.start_timeout_s,
            result_timeout_s=rollout.result_timeout_s,
            sync_timeout_s=rollout.sync_timeout_s,
        )
    except TimeoutError as error:
        key = f"{rollout.KEY}.start_timeout_s={rollout.start_timeout_s:g}"
        raise TrainingError(f"{error}; raise {key} if it takes longer") from error


def _placements(job: TrainingJob, pool: RayResourcePool) -> list[Placement]:
    """Where the servers run: beside the training workers, one a bundle of theirs, or wherever Ray has room."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from verl_omni.workers.rollout.replicas import Placement

    count, gpus = job.settings.replicas, job.settings.actor_rollout_ref.rollout.gpus_per_replica
    on_gpu = job.device != "cpu"
    if not job.colocated:
        return [Placement(num_gpus=gpus if on_gpu else 0)] * count
    bundles = [(group, index) for group in pool.pgs or () for index in range(group.bundle_count)]
    return [
        Placement(
            num_gpus=1 / job.settings.processes_per_device if on_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            ),
        )
        for group, index in (bundles[i % len(bundles)] for i in range(count))
    ]
