"""The model that is measured: a checkpoint, a tiny random one, or a full-size random one."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_omni.bench.flops import forward_flop
from verl_omni.bench.workload import Workload
from verl_omni.utils.imports import without_collecting
from verl_omni.workers.config import ConfigError
from verl_omni.workers.config.model import declared_architecture


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A checkpoint folder and the adapter that runs it."""

    path: Path
    architecture: str
    """``_class_name`` of its ``model_index.json``."""
    adapter: type
    """The adapter class."""
    name: str
    """For the record."""

    @classmethod
    def open(cls, path: str | Path, *, name: str, adapter: type | None = None) -> BenchModel:
        """The checkpoint at `path`; `adapter`: in place of the registered one. Raises :class:`ConfigError`."""
        if not Path(path).is_dir():
            raise ConfigError(
                f"{path} is no folder here; write that of a downloaded checkpoint in diffusers layout, or --tiny or "
                "--random and a family"
            )
        index = Path(path) / "model_index.json"
        architecture = declared_architecture(index)
        if architecture is None:
            raise ConfigError(f"{str(index)!r} has no _class_name; write it there")
        with without_collecting():
            from verl_omni.pipelines.model_base import VllmOmniPipelineBase

            registered = VllmOmniPipelineBase.get_class(architecture)
        return cls(path=Path(path), architecture=architecture, adapter=adapter or registered, name=name)

    @classmethod
    def open_random(cls, kind: str, family: str, path: Path) -> BenchModel:
        """What :func:`build_random` wrote."""
        if kind == "tiny":
            return cls.open(path, name=f"tiny {family}")
        from verl_omni.bench.random_adapters import ADAPTERS

        return cls.open(path, name=f"random {family}", adapter=ADAPTERS[family])

    @property
    def adapter_path(self) -> str:
        """Import path of the adapter."""
        return f"{self.adapter.__module__}.{self.adapter.__qualname__}"

    @property
    def transformer(self) -> dict[str, Any]:
        """Configuration of the transformer."""
        return self._config("transformer")

    @property
    def edge(self) -> int:
        """Pixels of an edge of a token: height and width are multiples of it."""
        vae = self._config("vae")
        blocks = vae.get("temperal_downsample", vae.get("block_out_channels", [0] * 4)[1:])
        patch: int = self.transformer.get("patch_size", 2)
        return patch * 2 ** len(blocks)

    def image_flop(self, load: Workload, lengths: list[int]) -> float | None:
        """Mean FLOP of the transformer for an image, prompts of `lengths` tokens; None: no formula for this model."""
        config, edge = self.transformer, self.edge
        tokens = (load.height // edge) * (load.width // edge)
        forwards = [forward_flop(config, tokens, load.text_tokens(length)) for length in lengths]
        negative = forward_flop(config, tokens, load.text_tokens(load.negative_text)) if load.cfg > 1 else 0.0
        known = [flop for flop in forwards if flop is not None]
        return None if negative is None or not known else load.steps * (sum(known) / len(known) + negative)

    def _config(self, part: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.path / part / "config.json").read_text(encoding="utf-8"))
        return config


def build_random(kind: str, family: str, path: Path) -> None:
    """Write a random model of `family` to the folder `path`, which is new; `kind` is "tiny" or "random", which is full
    size. A build that is cut short leaves nothing there."""
    from verl_omni.bench import full_size
    from verl_omni.testing import tiny_models

    build = tiny_models.build if kind == "tiny" else full_size.build_full_size
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        build(family, Path(folder) / path.name).rename(path)
