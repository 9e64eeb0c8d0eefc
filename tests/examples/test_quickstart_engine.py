"""The quickstart's promise that several machines train."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.scripts import TINY, run_script
from verl_omni.trainer.diffusion.metrics_file import read_metrics

pytestmark = pytest.mark.engine

SHORT = ["actor_rollout_ref.rollout.n=2", "data.train_batch_size=2", "trainer.default_local_dir=out"]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[str]:
    """Two Ray nodes on this machine, of two processors each; gives their address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=2", "--disable-usage-stats"]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    nodes = []
    try:
        for place in (["--head", f"--port={port}", "--include-dashboard=false"], [f"--address={address}"]):
            node = subprocess.Popen(
                [*ray, *place], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            nodes.append(node)
            assert node.stdout is not None
            assert any("Ray runtime started" in line for line in node.stdout)
        yield address
    finally:
        for node in reversed(nodes):
            node.terminate()
            node.communicate()


def test_two_machines_train(tmp_path, tiny_qwen, machines):
    overrides = [*SHORT, "trainer.nnodes=2", "trainer.total_training_steps=1"]
    result = run_script(TINY, *overrides, cwd=tmp_path, MODEL_PATH=str(tiny_qwen), RAY_ADDRESS=machines)
    assert result.returncode == 0, result.stderr[-4000:]
    assert [row["step"] for row in read_metrics(tmp_path / "out")] == [0, 1]
    assert result.stderr.count("rollout plan: mode=step_wise") == 2
