"""What can never be placed is refused with what was asked, what is there, and what to write."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.test_train_settings import ROLLOUT, settings
from verl_omni.trainer.diffusion.capacity import Need, needs
from verl_omni.workers.config import ConfigError

OWN = {f"{ROLLOUT}.colocate": False}


def run(nodes: int = 1, processes: int = 1, **more):
    return settings(
        **{"trainer.nnodes": nodes, "trainer.n_gpus_per_node": processes, "data.train_batch_size": 48}, **more
    )


def check(made, device: str, machines: list[dict[str, float]]) -> None:
    for need in needs(made, device):
        need.check([resources.get(need.kind, 0) for resources in machines], cluster=True)


def test_on_gpus_a_run_takes_gpus_and_the_cpus_that_ray_counts_its_processes_by():
    gpus, cpus = needs(run(2, 4), "cuda")
    assert (gpus.kind, gpus.group, gpus.total) == ("GPU", 4, 8)
    assert (cpus.kind, cpus.group, cpus.total) == ("CPU", 8, 16)  # an engine beside each
    gpus, cpus = needs(run(2, 4, **OWN, **{f"{ROLLOUT}.gpus_per_replica": 2}), "cuda")
    assert (gpus.total, cpus.total) == (2 * 4 + 4 * 2, 2 * 4 + 4)


def test_on_the_cpu_it_takes_cpus_alone():
    (cpus,) = needs(run(1, 2, **{f"{ROLLOUT}.replicas": 3}), "cpu")
    assert (cpus.kind, cpus.total) == ("CPU", 2 * (1 + 2))
    (cpus,) = needs(run(1, 2, **OWN, **{f"{ROLLOUT}.replicas": 3}), "cpu")
    assert cpus.total == 2 + 3


NODES, PER_NODE = r"trainer\.nnodes", r"trainer\.n_gpus_per_node"
TOO_MUCH = [
    (
        run(3, 8),
        [{"GPU": 8, "CPU": 96}] * 2 + [{"CPU": 16}],
        rf"{NODES}=3 × {PER_NODE}=8 takes 8 GPUs for training on each of 3 machines, but .* have 2 × 8 \+ 1 × 0;",
    ),
    (run(3, 8), [{"GPU": 8, "CPU": 96}] * 2, rf"; write {NODES}=2, or let more machines join \(ray start\)$"),
    (run(1, 8), [{"GPU": 4, "CPU": 96}] * 2, rf"; write {PER_NODE}=4, or let"),
    (run(), [{"CPU": 96}], r"; write trainer\.device=cpu, or let"),
    (
        run(1, 4, **OWN, **{f"{ROLLOUT}.gpus_per_replica": 2}),
        [{"GPU": 6, "CPU": 96}],
        r"takes 4 GPUs for training and 4 for rollouts, 2 on one machine, but .* 1 × 6; write .*replicas=1, or let",
    ),
    (run(1, 4, **OWN), [{"GPU": 4, "CPU": 96}], r"; write .*rollout\.colocate=true, or let"),
    (
        run(1, 4),
        [{"GPU": 4, "CPU": 6}],
        r"takes 8 CPUs for training, as each process counts as one, but .* have 1 × 6;",
    ),
    (
        run(1, 4),
        [{"GPU": 4, "CPU": 6}],
        rf"; write {PER_NODE}=3, or start Ray with more .* .*ray_kwargs\.num_cpus=8\)$",
    ),
]


@pytest.mark.parametrize(("asked", "machines", "message"), TOO_MUCH)
def test_what_a_cluster_cannot_hold_is_told(asked, machines, message):
    with pytest.raises(ConfigError, match=message):
        check(asked, "cuda", machines)


def test_on_the_cpu_its_cpus_are_compared():
    with pytest.raises(ConfigError, match=rf"takes 8 CPUs for training on each of 2 machines.*; write {NODES}=1, or"):
        check(run(2, 4), "cpu", [{"CPU": 8}])


@pytest.mark.parametrize(
    ("asked", "device", "machines"),
    [
        (run(2, 8), "cuda", [{"GPU": 8, "CPU": 96}] * 2),
        (run(2, 4), "cuda", [{"GPU": 8, "CPU": 96}]),  # two groups may share a machine
        (run(1, 4, **OWN), "cuda", [{"GPU": 4, "CPU": 96}] * 2),
        (run(1, 2), "cpu", [{"CPU": 4}]),
    ],
)
def test_what_fits_is_let_through(asked, device, machines):
    check(asked, device, machines)


sizes = st.integers(1, 4)


@given(st.lists(st.integers(0, 9), max_size=4), sizes, sizes, sizes)
def test_the_room_for_engines_is_that_of_the_best_way_to_place_the_groups(machines, groups, group, server):
    need = Need(kind="GPU", groups=groups, processes=group, per_process=1, servers=1, per_server=server)
    ways = itertools.product(*(range(devices // group + 1) for devices in machines))
    room = [
        sum((devices - here * group) // server for devices, here in zip(machines, way, strict=True))
        for way in ways
        if sum(way) == groups
    ]
    assert need.room_for_servers(machines) == max(room, default=None)
