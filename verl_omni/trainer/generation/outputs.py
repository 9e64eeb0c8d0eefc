"""What a generation run writes: images, a grid, trajectories, and a report of what ran."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from verl_omni.pipelines.stats import RolloutStats
from verl_omni.trainer.folders import check_writable, plain_name
from verl_omni.trainer.generation.settings import GenerationConfig
from verl_omni.trainer.sizes import SizeLabels
from verl_omni.utils.secrets import scrubbed
from verl_omni.utils.text import one_line
from verl_omni.workers.config import ConfigError
from verl_omni.workers.rollout.plan import RolloutPlan
from verl_omni.workers.rollout.request import RolloutError, RolloutRequest, RolloutSample

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from verl_omni.trainer.generation.grid import Tile

IMAGES, GRID, TRAJECTORIES, REPORT = "images", "grid.png", "trajectories.safetensors", "rollout.json"
_IMAGE_NAME = re.compile(r"\d{4,}-\d{2,}(\.\d+)?\.png")

Results = Sequence[tuple[RolloutRequest, RolloutSample | RolloutError]]
"""Every request with what came of it, in the order of the requests."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What ``rollout.json`` tells."""

    plan: RolloutPlan
    """What was planned."""
    stats: RolloutStats
    """What the engine did."""
    seconds: float
    """From the submission of all requests to the last result."""
    peak_memory_mb: float
    """The most device memory that the worker reserved, MiB; on a CPU the most that its process ever held."""

    def as_dict(self, results: Results) -> dict[str, Any]:
        """Plain data. The keys are public."""
        samples = [(request, result) for request, result in results if isinstance(result, RolloutSample)]
        failed = [result for _, result in results if isinstance(result, RolloutError)]
        images = sum(len(output_ids(sample)) for _, sample in samples)
        return {
            "mode": self.plan.mode.value,
            "reason": self.plan.reason,
            "notes": list(self.plan.notes),
            "max_num_seqs": self.plan.max_num_seqs,
            "request_batch_max_wait_ms": self.plan.request_batch_max_wait_ms,
            "rows_per_forward": self.plan.rows_per_forward,
            "num_requests": len(results),
            "num_images": images,
            "gen_s": round(self.seconds, 4),
            "images_per_s": round(images / self.seconds, 4),
            **self.stats.as_dict(),
            "failed": [{"id": error.request_id, "error": scrubbed(error.message)} for error in failed],
            "peak_memory_mb": round(self.peak_memory_mb, 1),
            "queue_wait_s": {
                size: {"requests": len(waits), "mean": round(sum(waits) / len(waits), 4), "max": round(max(waits), 4)}
                for size, waits in SizeLabels().waits(samples).items()
            },
            "samples": [
                {
                    "id": item.request_id,
                    "prompt": request.prompt,
                    "seed": item.seed,
                    "sde_windows": item.sde_windows,
                    "queue_wait_s": None if item.queue_wait_s is None else round(item.queue_wait_s, 4),
                }
                for request, item in samples
            ],
        }


def check_output_dir(config: GenerationConfig) -> None:
    """Raise :class:`ConfigError` unless all files can be written into `config.output_dir`, which need not exist yet."""
    folder = Path(config.output_dir).absolute()
    check_writable(folder, key=_key(config), files=(GRID, TRAJECTORIES, REPORT), folders=(IMAGES,))


def write_outputs(config: GenerationConfig, results: Results, report: RunReport, *, columns: int) -> None:
    """Write all files into `config.output_dir`, in place of those of an earlier run; the grid, an ornament, comes last.

    `columns` is the width of the grid in images. Files that no run writes are left alone. Raises :class:`ConfigError`
    for a request id that names no file, and where a file could not be written: then the others are, and what an earlier
    run wrote in its place is left.
    """
    folder = Path(config.output_dir)
    for _, result in results:
        if isinstance(result, RolloutSample):
            for name in output_ids(result):
                plain_name(f"{name}.png")
    writers: dict[str, Callable[[Path], None]] = {
        REPORT: lambda path: _write_report(path, results, report),
        IMAGES: lambda path: _write_images(path, results if config.save_images else ()),
        TRAJECTORIES: lambda path: _write_trajectories(path, results) if config.save_trajectories else None,
        GRID: lambda path: _write_grid(path, results, columns, config.grid_max_images) if config.grid else None,
    }
    failed: dict[str, str] = {}
    for name, write in writers.items():
        try:
            _replace(folder, name, write)
        except (OSError, SafetensorError) as error:
            failed[name] = getattr(error, "strerror", None) or one_line(str(error))
    if failed:
        told = ", ".join(f"{name} ({reason})" for name, reason in failed.items())
        raise ConfigError(
            f"{_key(config)}: could not write {told}; make room there, or give another folder. An earlier run's files "
            "of these names are left, all others are this run's"
        )


def _key(config: GenerationConfig) -> str:
    return f"generation.output_dir={config.output_dir!r}"


def _replace(folder: Path, name: str, write: Callable[[Path], None]) -> None:
    """Put what `write` makes, a file, a folder or nothing, in place of an earlier run's `name`; it is whole by then."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder, ignore_cleanup_errors=True) as partial:
        write(Path(partial) / name)
        made = [path.relative_to(partial) for path in Path(partial).rglob("*") if path.is_file()]
        for path in made:
            (folder / path).parent.mkdir(exist_ok=True)
            (partial / path).replace(folder / path)
    for path in _written(folder, name).difference(folder / path for path in made):
        path.unlink(missing_ok=True)
    if name == IMAGES and (folder / IMAGES).is_dir() and not any((folder / IMAGES).iterdir()):
        (folder / IMAGES).rmdir()


def _written(folder: Path, name: str) -> set[Path]:
    """The files that runs wrote into `folder` under `name`, and none else."""
    if name != IMAGES:
        return {folder / name}
    images = folder / IMAGES
    return {file for file in images.iterdir() if _IMAGE_NAME.fullmatch(file.name)} if images.is_dir() else set()


def _write_report(path: Path, results: Results, report: RunReport) -> None:
    content = json.dumps(report.as_dict(results), indent=1, ensure_ascii=False, default=str)
    path.write_text(content + "\n", encoding="utf-8")


def _write_images(folder: Path, results: Results) -> None:
    for name, image in _images(results):
        folder.mkdir(exist_ok=True)
        image.save(folder / f"{name}.png")


def _write_trajectories(path: Path, results: Results) -> None:
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(trajectory_tensors(results), path)
    path.chmod(mode)  # the library keeps it to its owner


def _write_grid(path: Path, results: Results, columns: int, most: int) -> None:
    from verl_omni.trainer.generation.grid import draw_grid

    if tiles := list(_tiles(results))[:most]:
        draw_grid(tiles, columns).save(path)


def output_ids(sample: RolloutSample) -> list[str]:
    """Id of each output of a sample: its request's, followed by ``.0``, ``.1`` … if there are several."""
    media = sample.images if sample.images is not None else sample.latents
    count = 0 if media is None else len(media)
    return [sample.request_id] if count == 1 else [f"{sample.request_id}.{index}" for index in range(count)]


def trajectory_tensors(results: Results) -> dict[str, Tensor]:
    """``<id>/<name>`` → tensor, for every output of every sample.

    Names: ``latents`` float32 [W+1, ...], ``log_probs`` and ``timesteps`` float32 [W] of the W recorded steps, left out
    where nothing was recorded; the text embeddings, unpadded, e.g. ``prompt_embeds`` [L, D] with its mask
    ``prompt_embeds_mask`` bool [L]; ``output_latents`` where latents were asked for in place of an image.
    """
    from verl_omni.pipelines.prompt_cache import with_masks

    tensors: dict[str, Tensor] = {}
    for _, sample in results:
        if isinstance(sample, RolloutSample):
            embeddings = with_masks(sample.prompt_embeddings)
            for index, name in enumerate(output_ids(sample)):
                per_output = {
                    "latents": sample.trajectory_latents,
                    "log_probs": sample.trajectory_log_probs,
                    "timesteps": sample.trajectory_timesteps,
                    "output_latents": sample.latents,
                }
                rows = {key: value[index] for key, value in per_output.items() if value is not None}
                for key, value in {**rows, **embeddings}.items():
                    tensors[f"{name}/{key}"] = value.clone().contiguous()  # the format rejects shared storage
    return tensors


def _images(results: Results) -> Iterator[tuple[str, Image]]:
    from PIL import Image

    for _, sample in results:
        if isinstance(sample, RolloutSample) and sample.images is not None:
            for name, pixels in zip(output_ids(sample), sample.images, strict=True):
                yield name, Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def _tiles(results: Results) -> Iterator[Tile]:
    """A place for each image, and for each request that failed."""
    from verl_omni.trainer.generation.grid import Tile

    for request, result in results:
        prompt = "(token ids)" if request.prompt_token_ids is not None else str(request.prompt)
        if isinstance(result, RolloutError):
            yield Tile(image=None, label=request.request_id, prompt=prompt)
        for name, image in _images([(request, result)]):
            yield Tile(image=image, label=name, prompt=prompt)
