"""What a measurement of rollout speed holds for, and how the key of a run is read off its configuration and checkpoint.

Runs and the benchmark call the same :meth:`ProfileKey.of`, so what one stores is what the other looks up.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import verl_omni
from verl_omni.workers.config.base import as_mapping, choice, flag, integer, text
from verl_omni.workers.config.rollout import OUTPUT_TYPES, DiffusionRolloutConfig

ATTENTION_VARIABLE = "DIFFUSION_ATTENTION_BACKEND"
"""The environment variable from which the engine takes the backend that its options do not name."""
DEFAULT_ATTENTION = "default"
"""The backend that the engine picks by itself."""
PACKAGES = ("torch", "vllm-omni")
"""Packages whose version decides the speed, beside verl_omni itself."""
_DIGEST_LENGTH = 12
_OPTIONS_TOLD_OTHERWISE = ("enforce_eager", "diffusion_attention_backend", "diffusion_attention_config")
"""Engine options that fields of their own stand for."""
_OPTIONS_WITHOUT_EFFECT = (
    "stage_init_timeout",
    "init_timeout",
    "log_stats",
    "enable_sleep_mode",
    "enable_multithread_weight_load",
    "num_weight_load_threads",
    "trust_remote_code",
)
"""Engine options that do not change how fast it runs once it is up."""


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """What a measurement holds for. Runs with the same key are about as fast as each other.

    Left out is what a run does not know beforehand or what changes little: the lengths of prompts and how many images
    share one, the layers that the LoRA is on, how many steps are stochastic, and in ``cfg`` for how many requests
    guidance runs.
    """

    model: str
    """Last part of the model's path or hub name, for the reader. It decides only where `transformer` is unknown."""
    transformer: str | None = None
    """Digest of the transformer's configuration, see :func:`transformer_digest`; None: unknown."""
    height: int | None = None
    """Pixels; None: the adapter's default."""
    width: int | None = None
    """Pixels; None: the adapter's default."""
    num_inference_steps: int | None = None
    """Denoising steps; None: the adapter's default."""
    max_sequence_length: int | None = None
    """Limit on text tokens, to which some adapters pad; None: the adapter's default."""
    output_type: str | None = "pt"
    """"pt": images are decoded; "latent": not; None: the adapter's default."""
    cfg: bool
    """Whether classifier-free guidance runs for any request, which doubles the forwards."""
    lora_rank: int
    """Rank of the LoRA that the policy has; 0: none."""
    lora_merged: bool
    """Whether the LoRA is part of the weights, rather than computed beside them."""
    dtype: str
    """Dtype of the model."""
    attention: str
    """Attention backend that the engine is told to use, see :func:`attention_backend`."""
    compiled: bool
    """Whether the transformer is compiled."""
    device: str
    """Name of the device as its driver gives it, "cpu" without one."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Further options of the engine, and ``rows_per_forward``, where they are configured."""
    versions: dict[str, str]
    """Package → version."""

    def __post_init__(self) -> None:
        for name in ("model", "dtype", "attention", "device"):
            text(f"profile key.{name}", getattr(self, name))
        text("profile key.transformer", self.transformer, null="unknown")
        choice("profile key.output_type", self.output_type, OUTPUT_TYPES, null="the adapter's default")
        default, kept = "the adapter's default", {"lora_rank": integer("profile key.lora_rank", self.lora_rank, low=0)}
        for name in ("height", "width", "num_inference_steps", "max_sequence_length"):
            kept[name] = integer(f"profile key.{name}", getattr(self, name), low=1, null=default)
        for name in ("cfg", "lora_merged", "compiled"):
            kept[name] = flag(f"profile key.{name}", getattr(self, name))
        for name in ("engine_options", "versions"):
            kept[name] = as_mapping(f"profile key.{name}", getattr(self, name))
        for package, number in kept["versions"].items():
            text(f"profile key.versions.{package}", number)
        for name, value in kept.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls, rollout: DiffusionRolloutConfig, *, model: str | Path, device: str, cfg: bool, lora_rank: int = 0
    ) -> ProfileKey:
        """The key of a run.

        Args:
            rollout: its configuration.
            model: checkpoint folder or hub name, of which the transformer's configuration is read.
            device: name of the device, "cpu" without one.
            cfg: whether guidance runs for any request.
            lora_rank: of the policy's LoRA; 0: none.
        """
        options = rollout.vllm_omni
        eager = flag(f"{rollout.KEY}.engine_kwargs.vllm_omni.enforce_eager", options.get("enforce_eager", False))
        return cls(
            model=Path(model).name or str(model),
            transformer=transformer_digest(model),
            cfg=cfg,
            lora_rank=lora_rank,
            lora_merged=lora_rank > 0 and rollout.merge_lora,
            attention=attention_backend(options),
            compiled=device != "cpu" and not eager,
            device=device,
            engine_options=_engine_options(rollout),
            versions=installed_versions(PACKAGES),
            **_request_shape(rollout),
        )

    def with_request_shape(self, rollout: DiffusionRolloutConfig) -> ProfileKey:
        """This key for the size, steps, text limit, output and dtype of `rollout`."""
        return replace(self, **_request_shape(rollout))

    def differences(self, key: ProfileKey) -> tuple[str, ...]:
        """In what `key` differs from this, the measured one: "name: measured with …, now …"; empty if it matches.

        The model's name is left out if both know their transformer: a checkpoint may be moved or renamed.
        """
        return tuple(
            f"{name}: measured with {_shown(old)}, now {_shown(new)}"
            for name, old, new in self._pairs(key)
            if old != new
        )

    def _pairs(self, key: ProfileKey) -> Iterator[tuple[str, Any, Any]]:
        for name in (item.name for item in fields(self)):
            old, new = getattr(self, name), getattr(key, name)
            if name == "model" and None not in (self.transformer, key.transformer):
                continue
            if isinstance(old, Mapping):
                for part in sorted({*old, *new}):
                    yield f"{name}.{part}", old.get(part), new.get(part)
            else:
                yield name, old, new


def attention_backend(options: Mapping[str, Any]) -> str:
    """Name of the attention backend that the engine gets by its `options` or the environment, in capitals.

    `DEFAULT_ATTENTION` if neither names one. What else ``diffusion_attention_config`` says follows the name as JSON.
    Raises :class:`ConfigError` if that is no mapping.
    """
    key = f"{DiffusionRolloutConfig.KEY}.engine_kwargs.vllm_omni.diffusion_attention_config"
    config = as_mapping(key, options.get("diffusion_attention_config"))
    default = config.pop("default", None)
    spec = {"backend": default} if isinstance(default, str) else as_mapping(f"{key}.default", default)
    places = (spec.pop("backend", None), options.get("diffusion_attention_backend"), os.environ.get(ATTENTION_VARIABLE))
    named = [str(place).upper() for place in places if place and str(place).lower() != "auto"]
    rest = {key: value for key, value in {**config, "default": spec}.items() if value}
    name = named[0] if named else DEFAULT_ATTENTION
    return f"{name} {json.dumps(rest, sort_keys=True)}" if rest else name


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Package → version of verl_omni and of `packages`; nothing is imported. A missing one is left out."""
    versions = {"verl-omni": verl_omni.__version__}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def transformer_digest(model: str | Path) -> str | None:
    """Digest of what ``transformer/config.json`` of a checkpoint says; None where it cannot be had.

    `model` is a folder or a name on the Hugging Face hub. What has no effect is left out, so that files of different
    versions of diffusers agree: keys that the class does not take, and values that are its defaults.
    """
    try:
        config = json.loads(_transformer_config(str(model)).read_text(encoding="utf-8"))
        name = str(config["_class_name"])
        told = {key: value for key, value in config.items() if not key.startswith("_")}
    except Exception:  # the hub's client raises many kinds; all mean that the file cannot be had
        return None
    defaults = _defaults(name)
    if defaults is not None:
        told = {key: value for key, value in told.items() if key in defaults and value != defaults[key]}
    return hashlib.sha256(json.dumps([name, told], sort_keys=True).encode()).hexdigest()[:_DIGEST_LENGTH]


def _transformer_config(model: str) -> Path:
    if Path(model).is_dir() or model.count("/") != 1:
        return Path(model) / "transformer/config.json"
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(model, "transformer/config.json"))


def _defaults(class_name: str) -> dict[str, Any] | None:
    """Parameter → default, as JSON has it, of a model class of diffusers; None for another class."""
    import diffusers

    cls = getattr(diffusers, class_name, None)
    if cls is None:
        return None
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: list(p.default) if isinstance(p.default, tuple) else p.default for p in parameters}


def _request_shape(rollout: DiffusionRolloutConfig) -> dict[str, Any]:
    names = ("height", "width", "num_inference_steps", "max_sequence_length", "output_type")
    return {**{name: getattr(rollout.pipeline, name) for name in names}, "dtype": rollout.dtype}


def _engine_options(rollout: DiffusionRolloutConfig) -> dict[str, Any]:
    """As JSON gives them back."""
    left_out = {*_OPTIONS_TOLD_OTHERWISE, *_OPTIONS_WITHOUT_EFFECT}
    options = {key: value for key, value in rollout.engine_options().items() if key not in left_out}
    if "rows_per_forward" in rollout.vllm_omni:
        options["rows_per_forward"] = rollout.vllm_omni["rows_per_forward"]
    return dict(json.loads(json.dumps(options, sort_keys=True, default=str)))


def _shown(value: Any) -> Any:
    return "nothing" if value is None else value
