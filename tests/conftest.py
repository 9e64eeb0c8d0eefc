"""Fixtures that all tests share. The environment is set before anything imports vLLM, which reads it once."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from verl_omni.platforms import verl_cpu_environment

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network fails at once
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.update(verl_cpu_environment())  # verl looks for its platforms when it is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing, and spinning threads starve the other tests
os.environ.setdefault("RAY_worker_niceness", "0")  # or the tests beside a run let its processes starve
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # logs go to pytest, and stdout is left alone


settings.register_profile("no deadline", deadline=None)  # a loaded machine is no fault of the code
settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process is left with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What modules hold stays, and is left out from now on: an engine collects garbage several times as it starts."""
    if any(item.get_closest_marker("engine") for item in session.items) and not session.config.option.collectonly:
        from verl_omni.workers.rollout.launch import import_engine

        import_engine()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With several processes (`-n`), tests that share what is slow to start run in the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class InGroups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            if file.startswith("tests/workers/test_engine_"):
                return "engines"
            if file == "tests/trainer/test_training.py":
                return "training sd3" if "[sd3]" in test else "training"
            return file

    config.option.loadscopereorder = False
    return InGroups(config, log)


@pytest.fixture(scope="session")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen-Image, seed 0. Read only: the whole session shares it."""
    return _tiny("qwen_image", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Stable Diffusion 3.5, seed 0. Read only: the whole session shares it."""
    return _tiny("sd3", tmp_path_factory)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A Ray of this machine's own, with 8 CPUs to hand out, whose processes find the tests. Quiet."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # it would write a token into the home folder
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    root = str(Path(__file__).parents[1])
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}},
    )
    yield
    ray.shutdown()


def _tiny(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from verl_omni.testing.tiny_models import build

    return build(family, tmp_path_factory.mktemp("tiny") / family)
