"""The engine that the tests of this folder share. Those of one kind run one after the other."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.workers.engines import BATCHED, FORWARDS, Engines, Kind, Progress
from tests.workers.policies import write_lora
from verl_omni.workers.rollout.engine import RolloutEngine
from verl_omni.workers.rollout.request import RolloutRequest


@pytest.fixture(scope="package", params=BATCHED, ids=str)
def kind(request) -> Kind:
    return request.param


@pytest.fixture(scope="package")
def progress(tmp_path_factory) -> Iterator[Progress]:
    path = tmp_path_factory.mktemp("progress") / "forwards"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORWARDS, str(path))
        yield Progress(path)


@pytest.fixture(scope="package")
def engines(tiny_qwen, tiny_sd3, progress) -> Iterator[Engines]:
    made = Engines({"qwen_image": tiny_qwen, "sd3": tiny_sd3})
    with made.runner:
        yield made
        made.close()


@pytest.fixture
def engine(engines, kind) -> RolloutEngine:
    return engines.take(kind)


@pytest.fixture
def run(engines) -> Callable:
    """Run a scenario of coroutines on the engine's loop."""
    return engines.runner.run


@pytest.fixture
def ask(kind) -> Callable[..., RolloutRequest]:
    """Make a request to the engine."""
    return kind.ask


@pytest.fixture(scope="package")
def checkpoints(tiny_qwen, tiny_sd3) -> dict[str, dict[str, Tensor]]:
    """The transformer weights of each family's checkpoint, without prefix."""
    models = {"qwen_image": tiny_qwen, "sd3": tiny_sd3}
    return {family: load_file(next((model / "transformer").glob("*.safetensors"))) for family, model in models.items()}


@pytest.fixture(scope="package")
def adapters(checkpoints, tmp_path_factory) -> dict[str, list[Path]]:
    """Two LoRA adapters that fit, of each family."""
    folder = tmp_path_factory.mktemp("loras")
    return {
        family: [write_lora(folder / f"{family}-{seed}", weights, seed) for seed in (1, 2)]
        for family, weights in checkpoints.items()
    }


@pytest.fixture
def transformer(checkpoints, kind) -> dict[str, Tensor]:
    """The checkpoint's transformer weights, without prefix."""
    return checkpoints[kind.family]


@pytest.fixture
def loras(adapters, kind) -> list[Path]:
    """Two LoRA adapters that fit."""
    return adapters[kind.family]
