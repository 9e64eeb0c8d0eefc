"""What the conformance suite asks for, and what must come back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from verl_omni.testing.harness import AdapterEngine
from verl_omni.workers.rollout.request import RolloutRequest


def workload(cfg_key: str, size: int, text_length: int) -> list[RolloutRequest]:
    """Requests that differ in all that a batch may mix."""
    texts = ["a red circle", "a blue square on a black background with the words rollout and trajectory in it", "hello"]
    wide = size + size // 2
    own: list[dict[str, Any]] = [
        dict(negative_prompt="blurry", **{cfg_key: 4.0}, sde_window_size=2, sde_window_range=(0, 4)),
        dict(sde_type="cps", noise_level=0.9),
        dict(negative_prompt="", **{cfg_key: 2.5}, sde_type="dance_sde", noise_level=0.3),
        dict(num_inference_steps=3, negative_prompt="blurry", **{cfg_key: 1.0}),
        dict(num_inference_steps=8, sde_window_size=3, sde_window_range=(2, 7), sde_type="cps"),
        dict(num_inference_steps=1),
        dict(num_outputs_per_prompt=2, negative_prompt="a long list of things to keep out of it", **{cfg_key: 5.0}),
        dict(num_outputs_per_prompt=3, sde_type="cps", sde_window_size=2, sde_window_range=(0, 5)),
        dict(noise_level=0.0),
        dict(logprobs=False),
        dict(sde_window_size=0, sde_window_range=(0, 4)),
        dict(width=wide, sde_window_size=1, sde_window_range=(0, 4)),
        dict(width=wide, height=wide, negative_prompt="blurry", **{cfg_key: 4.0}, num_inference_steps=4),
        dict(output_type="latent"),
    ]
    base: dict[str, Any] = dict(height=size, width=size, num_inference_steps=6, max_sequence_length=text_length)
    return [
        RolloutRequest(request_id=f"r{i}", **{**base, "prompt": texts[i % 3], "seed": 1000 + i, **knobs})
        for i, knobs in enumerate(own)
    ]


@contextlib.contextmanager
def failing_forward(pipeline: Any) -> Iterator[None]:
    """While it lasts, the transformer fails whenever the first row that it is given is among the rows."""
    hook = pipeline.predict_velocity
    poisoned: list[torch.Tensor] = []

    def predict_velocity(latents: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not poisoned:
            poisoned.append(latents[0].clone())
        if any(torch.equal(row, poisoned[0]) for row in latents):
            raise RuntimeError("planted failure")
        return hook(latents, *args, **kwargs)

    pipeline.predict_velocity = predict_velocity
    try:
        yield
    finally:
        del pipeline.predict_velocity


def full_precision(engine: AdapterEngine, request: RolloutRequest) -> Iterator[str]:
    """With a bfloat16 model: latents stay float32 from step to step, timesteps reach the transformer unrounded."""
    timesteps: list[torch.Tensor | None] = []

    def spy(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        timesteps.append(kwargs.get("timestep"))

    handle = engine.pipeline.transformer.register_forward_pre_hook(spy, with_kwargs=True)
    try:
        output = engine.run(request)[0]
    finally:
        handle.remove()
    if isinstance(output, Exception):
        yield f"{request.request_id}: failed: {output}"
        return
    latents = output.trajectory_latents
    if latents.dtype != torch.float32 or torch.equal(latents[:, 1:], latents[:, 1:].bfloat16().float()):
        yield "recorded latents are rounded to bfloat16"
    if any(t is not None and t.dtype != torch.float32 for t in timesteps):
        yield "the transformer's timestep is rounded to bfloat16"


def tensors(a: Any, b: Any) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
    """The tensors of two outputs, by name; None where one has none."""
    for name in ("trajectory_latents", "trajectory_log_probs", "trajectory_timesteps"):
        yield name, getattr(a, name), getattr(b, name)
    yield "images", a.images[0], b.images[0]
    left, right = (x.multimodal_output["metadata"]["prompt_embeddings"] for x in (a, b))
    for name in sorted({*left, *right}):
        yield name, left.get(name), right.get(name)


def contract(request: RolloutRequest, output: Any) -> Iterator[str]:
    """What is wrong with an output by itself: shapes, dtypes, windows, finite values, storage of its own."""
    n, steps = request.num_outputs_per_prompt, request.num_inference_steps or 0
    media, latents = output.images[0], output.trajectory_latents
    if request.output_type != "latent" and (
        media.dtype != torch.uint8 or media.shape != (n, 3, request.height, request.width)
    ):
        yield f"images are {media.dtype} {list(media.shape)}, not uint8 {[n, 3, request.height, request.width]}"
    windows = facts(output)["sde_window"]
    width = request.sde_window_size if request.sde_window_size is not None else max(steps - 1, 0)
    if len(windows) != n or any(stop - start != width or stop > steps for start, stop in windows):
        yield f"windows {windows} are not {n} of {width} steps in {steps}"
    recorded = recorded_steps(request, windows[0]) if windows else 0
    if (latents is None) != (recorded == 0):
        yield f"{'nothing is' if latents is None else 'steps are'} recorded where {recorded} steps are stochastic"
    if latents is not None:
        shapes = [list(getattr(output, f"trajectory_{name}").shape) for name in ("log_probs", "timesteps")]
        if list(latents.shape[:2]) != [n, recorded + 1] or shapes != [[n, recorded]] * 2:
            yield f"trajectory of {list(latents.shape)} and {shapes} for {n} rows with {recorded} recorded steps"
        for name in ("trajectory_latents", "trajectory_log_probs", "trajectory_timesteps"):
            tensor = getattr(output, name)
            if tensor.dtype != torch.float32 or not bool(torch.isfinite(tensor).all()):
                yield f"{name} is {tensor.dtype} or not finite"
        falling = output.trajectory_timesteps.diff(dim=1) < 0
        if not bool(falling.all()) or not bool((output.trajectory_timesteps.abs() <= 1000).all()):
            yield "timesteps do not fall within 0 to 1000"
    if n > 1 and latents is not None and torch.equal(latents[0], latents[1]):
        yield "two rows of one request are twins"
    for name, tensor, _ in tensors(output, output):
        if tensor is not None and tensor.untyped_storage().nbytes() > tensor.nbytes:
            yield f"{name} carries a storage larger than itself"


def recorded_steps(request: RolloutRequest, window: tuple[int, int]) -> int:
    """Steps of the window that draw noise; cps draws none on its way to sigma 0."""
    if request.noise_level == 0.0 or not request.logprobs:
        return 0
    start, stop = window
    return stop - start - (request.sde_type == "cps" and start < stop == request.num_inference_steps)


def facts(output: Any) -> dict[str, Any]:
    """What the adapter tells about a rollout; how long it waited is no part of that."""
    told = output.multimodal_output["metadata"]["rl"]
    return {name: value for name, value in told.items() if name != "queue_wait_s"}


def difference(a: Any, b: Any) -> float:
    """Largest difference of two tensors of one shape."""
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def shape(tensor: torch.Tensor | None) -> str:
    """For messages."""
    return "missing" if tensor is None else str(list(tensor.shape))
