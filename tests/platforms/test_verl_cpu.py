"""verl on the CPU, in a process of its own: verl settles its platform once, when it is first asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from verl_omni.platforms import verl_cpu_environment

pytestmark = pytest.mark.engine

ASK = """
import json, torch, verl
from verl.utils.device import get_device_id, get_device_name, get_nccl_backend, get_torch_device
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.profiler.performance import log_gpu_memory_usage

state = BaseCheckpointManager.get_rng_state()
first = torch.rand(3)
BaseCheckpointManager.load_rng_state(state)
log_gpu_memory_usage("memory", logger=None)
get_torch_device().empty_cache()
print(json.dumps({
    "name": get_device_name(),
    "device": str(get_device_id()),
    "backend": get_nccl_backend(),
    "rng": torch.equal(first, torch.rand(3)),
    "moved": str(torch.zeros(1).to(get_device_id()).device),
}))
"""
AUTOMATIC = """
import os
import verl, verl_omni.platforms.verl_cpu
from verl.utils.device import get_device_name
print(get_device_name())
"""


def answer(code: str, **environment: str) -> str:
    """The last line that `code` prints in a new process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_verl_runs_on_the_cpu_where_the_environment_says_so() -> None:
    assert json.loads(answer(ASK, **verl_cpu_environment())) == {
        "name": "cpu",
        "device": "cpu",
        "backend": "gloo",
        "rng": True,
        "moved": "cpu",
    }


def test_the_platform_is_never_picked_by_itself() -> None:
    assert answer(AUTOMATIC) != "cpu"
