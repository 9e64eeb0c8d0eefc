"""What the tests of the engine share: kinds of engine, one alive at a time; requests; how far the engine is."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from verl_omni.pipelines.engine_backend import RolloutDiffusionEngine
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.plan import RolloutMode, RolloutPlan
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

CAP = 4
LONG_STEPS = 30
LONG = {"num_inference_steps": LONG_STEPS, "sde_window_range": (LONG_STEPS - 4, LONG_STEPS - 1)}
"""Of a request that is still running when the test does something to it, and that records what comes after that."""
FORWARDS = "VERL_OMNI_TEST_FORWARDS"
"""Environment variable: path of the file in which `telling_adapters` tell."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family as the requests of a test see it."""

    adapter: str
    """Class in `telling_adapters`."""
    cfg_key: str
    """The knob of guidance."""
    prompt: dict[str, Any]
    """Prompt of every request, and what bounds it."""
    negative: dict[str, Any]
    """Negative prompt of every request."""


FAMILIES = {
    "qwen_image": Family(
        adapter="TellingQwen",
        cfg_key="true_cfg_scale",
        prompt={"prompt_token_ids": list(range(5, 60))},
        negative={"negative_prompt_token_ids": list(range(5, 50))},
    ),
    "sd3": Family(
        adapter="TellingSD3",
        cfg_key="guidance_scale",
        prompt={"prompt": "a red circle", "max_sequence_length": 32},
        negative={"negative_prompt": "blurry"},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How an engine is started."""

    family: str
    mode: RolloutMode
    executor: str = "uni"
    adapter: str | None = None
    """Class in `telling_adapters`; None: the family's."""
    rows_per_forward: int | None = None
    merge_lora: bool = False
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        merged = "merged" if self.merge_lora else None
        return "-".join(filter(None, (self.adapter or self.family, self.executor, self.mode.value, merged)))

    @property
    def plan(self) -> RolloutPlan:
        return RolloutPlan(
            mode=self.mode,
            max_num_seqs=1 if self.mode is RolloutMode.SERIAL else CAP,
            request_batch_max_wait_ms=0.0,
            rows_per_forward=self.rows_per_forward,
            reason="the test says so",
            notes=self.notes,
        )

    def ask(self, name: str, *, scale: float = 4.0, **knobs: Any) -> RolloutRequest:
        """A request of the family, guided with `scale`."""
        family = FAMILIES[self.family]
        defaults = {
            **family.prompt,
            **family.negative,
            family.cfg_key: scale,
            "height": 64,
            "width": 64,
            "num_inference_steps": 4,
            "sde_window_size": 2,
            "sde_window_range": (0, 3),
            "seed": 7,
        }
        return RolloutRequest(request_id=name, **(defaults | knobs))


BATCHED = [
    Kind(family="qwen_image", mode=RolloutMode.REQUEST_LEVEL),
    Kind(family="sd3", mode=RolloutMode.STEP_WISE),
    Kind(family="qwen_image", mode=RolloutMode.REQUEST_LEVEL, executor="mp"),
]
"""The kinds that most tests run on."""
MERGED = [replace(kind, merge_lora=True) for kind in BATCHED[:2]]
"""Both families and both batched modes, with the LoRA in the weights."""
STEP_ONLY = Kind(
    family="qwen_image",
    mode=RolloutMode.STEP_WISE,
    adapter="StepOnlyQwen",
    rows_per_forward=2,
    notes=("the first note", "the second note"),
)
SERIAL = Kind(family="qwen_image", mode=RolloutMode.SERIAL)
SD3_WAVES = Kind(family="sd3", mode=RolloutMode.REQUEST_LEVEL)


class Engines:
    """At most one live engine, of the kind that was taken last, and its event loop."""

    def __init__(self, models: dict[str, Path]) -> None:
        self.runner = asyncio.Runner()
        self._models = models
        self._kind: Kind | None = None
        self._engine: RolloutEngine | None = None

    def take(self, kind: Kind) -> RolloutEngine:
        """The engine of this kind; started if another kind, or a closed one, was there."""
        if self._engine is None or self._kind != kind or self._engine._closed:
            self.close()
            self._engine, self._kind = self.runner.run(self._start(kind)), kind
        return self._engine

    def close(self) -> None:
        """Close the live engine, if there is one."""
        if self._engine is not None:
            self.runner.run(self._engine.close())
            self._engine = None

    async def _start(self, kind: Kind) -> RolloutEngine:
        return await RolloutEngine.start(
            model_path=self._models[kind.family],
            plan=kind.plan,
            adapter=f"tests.workers.telling_adapters.{kind.adapter or FAMILIES[kind.family].adapter}",
            dtype="float32",
            executor=kind.executor,
            merge_lora=kind.merge_lora,
        )


class Progress:
    """What the adapter has told, see `telling_adapters`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    async def under_way(self, work: Coroutine[Any, Any, Any], rows: int) -> asyncio.Task[Any]:
        """`work` as a task, once a forward of so many rows is done (or `work` is, which the test will notice)."""
        task = asyncio.create_task(work)
        await self.forward(rows, task)
        return task

    async def forward(self, rows: int, task: asyncio.Task[Any]) -> None:
        """Wait for the next forward of so many rows, or for the end of `task`."""
        before = self._path.stat().st_size
        while not task.done() and rows not in self._path.read_bytes()[before:]:
            await asyncio.sleep(0)


def backend_of() -> RolloutDiffusionEngine:
    """The control side of the live engine, which is in this process."""
    (backend,) = (o for o in gc.get_objects() if type(o) is RolloutDiffusionEngine and not o._closed)
    return backend


def held_outputs() -> int:
    """What the live engine knows of outputs of workers that are to come, or to be fetched: none under `uni`."""
    executor = vars(backend_of().executor)
    tables = ("_completed_outputs", "_output_futures", "_batch_split_map", "_promises", "_unwanted")
    return sum(len(executor.get(table, ())) for table in tables)


async def collect(engine: RolloutEngine, requests: Iterable[RolloutRequest]) -> dict[str, RolloutSample | RolloutError]:
    """The outcome of a burst by request id."""
    return {item.request_id: item async for item in engine.generate_all(list(requests))}


async def solo(engine: RolloutEngine, requests: Iterable[RolloutRequest]) -> list[RolloutSample]:
    """Each alone, one after the other."""
    return [await engine.generate(request) for request in requests]


def same(a: RolloutSample, b: RolloutSample, atol: float = 1e-5) -> bool:
    """Whether two recorded trajectories are equal."""
    return torch.allclose(a.trajectory_latents, b.trajectory_latents, atol=atol, rtol=0)
