"""How results leave the device; on a CPU, where that is a copy at most."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import torch

from verl_omni.pipelines.rows import Rollout, Row
from verl_omni.pipelines.transfer import HostCopies, results_to_host


def row(steps: list[int], shape: tuple[int, ...] = (2, 3)) -> Row:
    return Row(
        generator=torch.Generator(),
        window=(0, len(steps)),
        table=torch.zeros(4, 7),
        stochastic=[False] * 4,
        record=True,
        latents=[torch.randn(shape) for _ in range(len(steps) + 1)] if steps else [],
        log_probs=[torch.randn(()) for _ in steps],
        steps=steps,
    )


def rollout(*rows: Row, size: int = 4, dtype: torch.dtype = torch.uint8) -> Rollout:
    media = torch.randint(0, 9, (len(rows), 3, size, size)).to(dtype)
    finite = torch.rand(len(rows)) > 0.5
    latents = torch.empty(len(rows), 0)
    return Rollout(
        params=SimpleNamespace(), rows=list(rows), latents=latents, cond={}, uncond=None, media=media, finite=finite
    )


def move(rollouts: list[Rollout]) -> None:
    states = [SimpleNamespace(request_id=f"r{i}", extra={"rollout": one}) for i, one in enumerate(rollouts)]
    results_to_host(states, torch.device("cpu"))


def recorded(one: Rollout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.stack(r.latents), torch.stack(r.log_probs)) for r in one.rows if r.steps]


def test_each_rollout_gets_back_what_was_its_own():
    rollouts = [
        rollout(row([0, 1]), row([1, 2])),
        rollout(row([]), dtype=torch.float32),
        rollout(row([2])),
        rollout(row([1, 2])),
    ]
    wanted = [
        (
            one.media.clone(),
            one.finite.clone(),
            [(torch.stack(r.latents), torch.stack(r.log_probs)) for r in one.rows if r.steps],
        )
        for one in rollouts
    ]
    move(rollouts)
    for one, (media, finite, trajectories) in zip(rollouts, wanted, strict=True):
        assert one.error is None and torch.equal(one.media, media) and torch.equal(one.finite, finite)
        for mine, theirs in zip(recorded(one), trajectories, strict=True):
            assert all(map(torch.equal, mine, theirs))


def test_what_cannot_be_moved_fails_alone():
    broken = rollout(row([0, 1]))
    broken.rows[0].latents[1] = torch.randn(5)
    failed = rollout(row([0, 1]))
    failed.error = KeyError("earlier")
    good, other_size = rollout(row([0, 1])), rollout(row([0, 1]), size=6)
    move([good, broken, failed, other_size])
    assert isinstance(broken.error, RuntimeError) and isinstance(failed.error, KeyError)
    assert good.error is None and other_size.error is None
    assert good.rows[0].trajectory() is not None


def test_a_prompt_that_is_forgotten_is_not_kept_by_its_copies():
    copies, embeds = HostCopies(), {"prompt_embeds": torch.randn(2, 3)}
    assert torch.equal(copies.of(embeds)["prompt_embeds"], embeds["prompt_embeds"])
    alive = weakref.ref(embeds["prompt_embeds"])
    del embeds
    gc.collect()
    assert alive() is None
