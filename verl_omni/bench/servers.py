"""Several engines of one machine, each in a process of its own under Ray, behind the face of a single one."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import torch

from verl_omni.pipelines.stats import RolloutStats
from verl_omni.trainer.diffusion.cluster import prepare_process
from verl_omni.workers.rollout.handle import Placement
from verl_omni.workers.rollout.replicas import RolloutReplicas
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample
from verl_omni.workers.rollout.server import ServerSettings
from verl_omni.workers.rollout.staging import LoraAdapter


class Servers:
    """Offers what the bench needs of a :class:`~verl_omni.workers.rollout.engine.RolloutEngine`."""

    def __init__(self, replicas: RolloutReplicas) -> None:
        self._replicas = replicas
        self._versions = itertools.count(1)

    @classmethod
    async def start(cls, settings: ServerSettings, replicas: int) -> Servers:
        """Start them, each on a GPU of its own where there are GPUs; Ray too if it does not run."""
        start_ray()
        # No CPUs: Ray would let no more servers start than it counted when it was started, for another point.
        placement = Placement(num_cpus=0, num_gpus=1 if torch.cuda.is_available() else 0)
        return cls(await RolloutReplicas.start(settings, [placement] * replicas))

    async def generate(self, request: RolloutRequest) -> RolloutSample:
        """One request. Raises :class:`RolloutError`."""
        async with aclosing(self._replicas.generate_groups([[request]])) as results:
            async for result in results:
                if isinstance(result, RolloutError):
                    raise result
                return result
        raise RolloutError(request.request_id, "its server gave no result")

    def generate_all(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[RolloutSample | RolloutError, None]:
        """All at once; requests that follow each other with one prompt go to one server."""
        groups = [list(group) for _, group in itertools.groupby(requests, key=lambda r: r.prompt_token_ids)]
        return self._replicas.generate_groups(groups)

    async def stats(self, reset: bool = False) -> RolloutStats:
        """Summed over the servers."""
        return await self._replicas.stats(reset)

    async def load_lora(self, adapter: LoraAdapter) -> None:
        """Make `adapter` the policy of all servers."""
        await self._replicas.sync("lora", next(self._versions), (adapter.config, adapter.tensors))

    async def close(self) -> None:
        """End the servers."""
        await self._replicas.close()


def prepare_for_ray() -> None:
    """Set what Ray reads when it is imported, by vLLM for one; call before that."""
    prepare_process("cuda" if torch.cuda.is_available() else "cpu", own_ray=True)


def start_ray() -> None:
    """Start a Ray of this process's own unless one runs; after :func:`prepare_for_ray`."""
    import ray

    if not ray.is_initialized():
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
