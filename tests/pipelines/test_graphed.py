"""When an encoder runs as a CUDA graph, with captures that only pretend."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from verl_omni.pipelines import graphed
from verl_omni.pipelines.graphed import MAX_GRAPHS, GraphedEncoder, can_graph


class Captures:
    """Stands in for the capture: counts, raises what it is told to, and replays by calling."""

    def __init__(self) -> None:
        self.count, self.error = 0, None

    def __call__(self, encode, ids):
        if self.error is not None:
            raise self.error
        self.count += 1
        inputs = tuple(x.clone() for x in ids)
        outputs = encode(*inputs)

        def replay():
            for mine, new in zip(outputs, encode(*inputs), strict=True):
                mine.copy_(new)

        return SimpleNamespace(graph=SimpleNamespace(replay=replay), inputs=inputs, outputs=outputs)


@pytest.fixture
def captures(monkeypatch):
    captures = Captures()
    monkeypatch.setattr(graphed, "_capture", captures)
    return captures


def test_outside_a_capture_what_may_run_beside_the_rest_runs_as_it_stands():
    with graphed.beside() as done:
        (doubled,) = double(torch.ones(2))
    done()
    assert doubled.tolist() == [2, 2]


def double(ids):
    return (ids * 2,)


def test_a_graph_is_made_once_a_shape_and_gives_what_the_encoder_gives(captures):
    encoder = GraphedEncoder(double, enabled=True)
    for ids in (torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5]), torch.tensor([6, 7])):
        assert torch.equal(encoder(ids)[0], ids * 2)
    assert captures.count == 2


def test_results_are_not_overwritten_by_the_next_call(captures):
    encoder = GraphedEncoder(double, enabled=True)
    first = encoder(torch.tensor([1]))[0]
    encoder(torch.tensor([2]))
    assert first.tolist() == [2]


def test_the_shape_that_was_not_used_for_longest_makes_room(captures):
    encoder = GraphedEncoder(double, enabled=True)
    for length in range(1, MAX_GRAPHS + 2):
        encoder(torch.ones(length))
    encoder(torch.ones(2))
    assert captures.count == MAX_GRAPHS + 1
    encoder(torch.ones(1))
    assert captures.count == MAX_GRAPHS + 2


def test_a_failed_capture_ends_graphs_with_a_warning(captures, caplog):
    captures.error = RuntimeError("not while capturing")
    encoder = GraphedEncoder(double, enabled=True)
    with caplog.at_level(logging.WARNING):
        assert encoder(torch.tensor([3]))[0].tolist() == [6]
    assert "not while capturing" in caplog.text
    captures.error = None
    encoder(torch.tensor([3]))
    assert captures.count == 0


def test_want_of_memory_ends_no_graphs(captures):
    encoder = GraphedEncoder(double, enabled=True)
    captures.error = torch.OutOfMemoryError("full")
    assert encoder(torch.tensor([3]))[0].tolist() == [6]
    captures.error = None
    encoder(torch.tensor([3]))
    assert captures.count == 1


def test_cleared_graphs_are_made_again(captures):
    encoder = GraphedEncoder(double, enabled=True)
    encoder(torch.tensor([3]))
    encoder.clear()
    encoder(torch.tensor([3]))
    assert captures.count == 2


def test_graphs_are_for_cuda_where_weights_stay_and_nothing_is_eager():
    def config(**options):
        return SimpleNamespace(**{"enforce_eager": False, **options})

    cuda = torch.device("cuda")
    assert can_graph(cuda, config())
    assert not can_graph(torch.device("cpu"), config())
    assert not can_graph(cuda, config(enforce_eager=True))
    assert not can_graph(cuda, config(enable_cpu_offload=True))
    assert not can_graph(cuda, config(enable_layerwise_offload=True))
