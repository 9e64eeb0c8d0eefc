"""How images are generated: batching, sampling defaults, the engine's options."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from verl_omni.workers.config.base import (
    ConfigError,
    as_mapping,
    choice,
    flag,
    integer,
    nearest,
    number,
    path,
    text,
    unknown_key,
)


class RolloutMode(StrEnum):
    """What is batched."""

    STEP_WISE = "step_wise"
    """One denoising step of many requests, which join and leave between steps."""
    REQUEST_LEVEL = "request_level"
    """Whole requests."""
    SERIAL = "serial"
    """Nothing."""


BATCHING_MODES = ("auto", *RolloutMode)
SDE_TYPES = ("sde", "cps", "dance_sde")
OUTPUT_TYPES = ("pt", "latent")
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Short names of the dtypes that the engine takes."""
PLAN_KEYS = ("max_num_seqs", "step_execution", "request_batch_max_wait_ms", "rows_per_forward")
"""Keys of ``engine_kwargs.vllm_omni`` that the plan reads; the engine gets them from the plan."""
MANAGED_KEYS = {
    "model": "actor_rollout_ref.model.path",
    "dtype": "actor_rollout_ref.rollout.dtype",
    "lora_path": "actor_rollout_ref.model.lora_path",
    "lora_scale": "actor_rollout_ref.model.lora_scale",
    "static_lora_scale": "actor_rollout_ref.model.lora_scale",
    "model_class_name": "actor_rollout_ref.model.architecture",
    "custom_pipeline_args": "actor_rollout_ref.rollout.external_lib",
    "engine_backend": None,
    "worker_extension_cls": None,
    "stage_id": None,
}
"""Engine keys that rollouts set themselves → the key to write instead, if there is one."""
UNMERGEABLE = (
    "quantization",
    "quantization_config",
    "tensor_parallel_size",
    "use_hsdp",
    "enable_layerwise_offload",
    "enable_distributed_layerwise_offload",
)
"""Keys of ``engine_kwargs.vllm_omni`` under which a layer's parameter is not its whole, plain weight: the early word.
What decides is ``merged_lora.check_mergeable``, once the layers are there."""
MAX_PORT = 65535
MISSPELT = 0.85
"""Similarity from which an engine key counts as a misspelt one of `PLAN_KEYS`; high, as others look like them."""


@dataclass(kw_only=True)
class DiffusionPipelineConfig:
    """``rollout.pipeline``: defaults of every request; null leaves it to the model's adapter."""

    KEY: ClassVar[str] = "actor_rollout_ref.rollout.pipeline"

    height: int | None = 512
    """Pixels."""
    width: int | None = 512
    """Pixels."""
    num_inference_steps: int | None = 10
    """Denoising steps."""
    true_cfg_scale: float | None = None
    """Classifier-free guidance of models that call it so (Qwen-Image); on above 1 with a negative prompt."""
    guidance_scale: float | None = None
    """The same for models that call it so (SD3.5)."""
    max_sequence_length: int | None = None
    """Limit on text tokens; a longer prompt is an error of its request."""
    output_type: str | None = "pt"
    """"pt": uint8 pixels; "latent": the final latents, undecoded."""

    def __post_init__(self) -> None:
        default = "the adapter's default"
        for name in ("height", "width", "num_inference_steps", "max_sequence_length"):
            setattr(self, name, integer(f"{self.KEY}.{name}", getattr(self, name), low=1, null=default))
        for name in ("true_cfg_scale", "guidance_scale"):
            setattr(self, name, number(f"{self.KEY}.{name}", getattr(self, name), null=default))
        self.output_type = choice(f"{self.KEY}.output_type", self.output_type, OUTPUT_TYPES, null=default)


@dataclass(kw_only=True)
class DiffusionRolloutAlgoConfig:
    """``rollout.algo``: the stochastic steps of every request."""

    KEY: ClassVar[str] = "actor_rollout_ref.rollout.algo"

    noise_level: float = 0.7
    """Strength of the noise; 0 makes every step deterministic, and nothing is recorded."""
    sde_type: str = "sde"
    """"sde", "cps" or "dance_sde"."""
    sde_window_size: int | None = None
    """Number of stochastic steps; null: all but the last."""
    sde_window_range: tuple[int, int] | None = None
    """[lo, hi): the steps in which a window of `sde_window_size` may lie; null: all but the last."""

    def __post_init__(self) -> None:
        self.noise_level = number(f"{self.KEY}.noise_level", self.noise_level, low=0)
        self.sde_type = choice(f"{self.KEY}.sde_type", self.sde_type, SDE_TYPES)
        if self.sde_type == "cps" and self.noise_level > 1:
            raise ConfigError(f"{self.KEY}.noise_level={self.noise_level:g} must be from 0 to 1 with sde_type=cps")
        size = integer(f"{self.KEY}.sde_window_size", self.sde_window_size, low=0, null="all steps but the last")
        self.sde_window_size = size
        if self.sde_window_range is None:
            return
        key, value = f"{self.KEY}.sde_window_range", self.sde_window_range
        if isinstance(value, (str, Mapping, Set)) or not hasattr(value, "__len__") or len(value) != 2:
            raise ConfigError(f"{key}={value!r} must be two integers [lo, hi], or null for all steps but the last")
        lo, hi = (integer(key, bound, low=0) for bound in value)
        if size is None:
            raise ConfigError(
                f"{key}=[{lo}, {hi}] is given without sde_window_size; write {self.KEY}.sde_window_size=… too, "
                f"or {key}=null"
            )
        if hi < lo + size:
            raise ConfigError(f"{key}=[{lo}, {hi}] has no room for sde_window_size={size}; need lo + size <= hi")
        self.sde_window_range = (lo, hi)


@dataclass(kw_only=True)
class DiffusionSamplingConfig:
    """``rollout.val_kwargs``: what validation samples differently; null: as in training."""

    KEY: ClassVar[str] = "actor_rollout_ref.rollout.val_kwargs"

    n: int = 1
    """Samples a prompt."""
    seed: int | None = 42
    """Base of the row seeds; null: unseeded."""
    num_inference_steps: int | None = None
    """Denoising steps."""
    true_cfg_scale: float | None = None
    """See ``rollout.pipeline``."""
    guidance_scale: float | None = None
    """See ``rollout.pipeline``."""
    noise_level: float | None = 0.0
    """0: validation images are deterministic given their seed."""

    def __post_init__(self) -> None:
        same = "the value used in training"
        self.n = integer(f"{self.KEY}.n", self.n, low=1)
        self.seed = integer(f"{self.KEY}.seed", self.seed, low=0, null="unseeded rows")
        self.num_inference_steps = integer(
            f"{self.KEY}.num_inference_steps", self.num_inference_steps, low=1, null=same
        )
        self.true_cfg_scale = number(f"{self.KEY}.true_cfg_scale", self.true_cfg_scale, null=same)
        self.guidance_scale = number(f"{self.KEY}.guidance_scale", self.guidance_scale, null=same)
        self.noise_level = number(f"{self.KEY}.noise_level", self.noise_level, low=0, null=same)


@dataclass(kw_only=True)
class DiffusionRolloutConfig:
    """``actor_rollout_ref.rollout``: how images are generated."""

    KEY: ClassVar[str] = "actor_rollout_ref.rollout"
    TRAINING_KEYS: ClassVar[tuple[str, ...]] = (
        "replicas",
        "gpus_per_replica",
        "colocate",
        "start_timeout_s",
        "result_timeout_s",
        "sync_timeout_s",
    )
    """Fields without effect in a rollout without training."""

    name: str = "vllm_omni"
    """The rollout engine."""
    n: int = 1
    """Samples a prompt, each a request with a seed of its own."""
    seed: int | None = 42
    """Base of the row seeds; null: unseeded, other images each time."""
    dtype: str = "bfloat16"
    """"bfloat16", "float16" or "float32"."""
    merge_lora: bool = False
    """Add the LoRA to the rollout's weights, rounded to `dtype`, instead of running it beside them, which is slower."""
    batching_mode: str | None = None
    """"step_wise", "request_level", "serial" or "auto"; null: as `step_execution` and `max_num_seqs` say."""
    step_execution: bool = False
    """Ask for step-wise batching. False asks for nothing."""
    max_num_seqs: int | None = None
    """Requests in a batch at most; may also stand in ``engine_kwargs.vllm_omni``. null: unset."""
    profile: str | None = None
    """JSON file of a measured profile, or folder of such files, which "auto" and an unset cap go by; null: none."""
    external_lib: str | None = None
    """Module, or path of a .py file, that registers adapters, losses or advantage estimators when it is imported; null:
    none."""
    log_prob_micro_batch_size_per_gpu: int | None = None
    """Samples in one log-prob forward of the trainer, to be compared with the rollout's; null:
    ``actor.ppo_micro_batch_size_per_gpu``, or unknown without training."""
    replicas: int | None = None
    """Rollout engines, which share the requests; null: as many as the training processes' devices are enough for."""
    gpus_per_replica: int = 1
    """Devices of one engine."""
    colocate: bool = True
    """Share the devices of the training processes, asleep during updates; false: take devices of their own."""
    start_timeout_s: float = 1800.0
    """Seconds until all engines must be up, and later one that takes the place of a dead one. A large checkpoint on a
    slow disk takes minutes to load, from the hub longer."""
    result_timeout_s: float | None = None
    """Seconds after which an engine that has requests and gives no result counts as dead and is replaced; longer than
    a whole batch takes. null: it is waited for, as long as its process lives."""
    sync_timeout_s: float | None = 1800.0
    """The same for an engine that takes a new policy, falls asleep or wakes up; null: it is waited for."""
    metrics_port: int | None = None
    """Where the run serves metrics to Prometheus; 0: any port that is free, which the log tells; null: nowhere."""
    metrics_host: str = "127.0.0.1"
    """Address that it listens at: as it is, this machine alone can read them; "0.0.0.0": whoever reaches it."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """``engine_kwargs.vllm_omni``: any option of the engine, and those of the plan: max_num_seqs, step_execution,
    request_batch_max_wait_ms, rows_per_forward (`PLAN_KEYS`). null: the engine's default."""
    pipeline: DiffusionPipelineConfig = field(default_factory=DiffusionPipelineConfig)
    """Sampling defaults of the model's pipeline."""
    algo: DiffusionRolloutAlgoConfig = field(default_factory=DiffusionRolloutAlgoConfig)
    """Sampling defaults of the algorithm."""
    val_kwargs: DiffusionSamplingConfig = field(default_factory=DiffusionSamplingConfig)
    """What validation samples differently."""

    def __post_init__(self) -> None:
        self.name = choice(f"{self.KEY}.name", self.name, ("vllm_omni",))
        self.n = integer(f"{self.KEY}.n", self.n, low=1)
        self.seed = integer(f"{self.KEY}.seed", self.seed, low=0, null="unseeded rows")
        dtype = DTYPES.get(self.dtype, self.dtype) if isinstance(self.dtype, str) else self.dtype
        self.dtype = choice(f"{self.KEY}.dtype", dtype, tuple(DTYPES.values()))
        self.merge_lora = flag(f"{self.KEY}.merge_lora", self.merge_lora)
        explicit = "what step_execution and max_num_seqs say"
        self.batching_mode = choice(f"{self.KEY}.batching_mode", self.batching_mode, BATCHING_MODES, null=explicit)
        self.step_execution = flag(f"{self.KEY}.step_execution", self.step_execution, null="false") or False
        self.max_num_seqs = integer(f"{self.KEY}.max_num_seqs", self.max_num_seqs, low=1, null="unset")
        self.profile = path(f"{self.KEY}.profile", self.profile, null="none")
        self.external_lib = path(f"{self.KEY}.external_lib", self.external_lib, null="none")
        self.log_prob_micro_batch_size_per_gpu = integer(
            f"{self.KEY}.log_prob_micro_batch_size_per_gpu",
            self.log_prob_micro_batch_size_per_gpu,
            low=1,
            null="unknown",
        )
        self.replicas = integer(
            f"{self.KEY}.replicas", self.replicas, low=1, null="as many as the training processes' devices"
        )
        self.gpus_per_replica = integer(f"{self.KEY}.gpus_per_replica", self.gpus_per_replica, low=1)
        self.colocate = flag(f"{self.KEY}.colocate", self.colocate)
        self.start_timeout_s = number(f"{self.KEY}.start_timeout_s", self.start_timeout_s, above=0)
        for name in ("result_timeout_s", "sync_timeout_s"):
            setattr(self, name, number(f"{self.KEY}.{name}", getattr(self, name), above=0, null="no limit"))
        self.metrics_port = integer(f"{self.KEY}.metrics_port", self.metrics_port, low=0, null="no metrics")
        self.metrics_host = text(f"{self.KEY}.metrics_host", self.metrics_host)
        if self.metrics_port is not None and self.metrics_port > MAX_PORT:
            raise ConfigError(f"{self.KEY}.metrics_port={self.metrics_port} must be at most {MAX_PORT}")
        if self.metrics_port is not None and importlib.util.find_spec("prometheus_client") is None:
            raise ConfigError(
                f"{self.KEY}.metrics_port needs the package prometheus_client: pip install prometheus_client"
            )
        self.engine_kwargs = {"vllm_omni": _engine_options(f"{self.KEY}.engine_kwargs", self.engine_kwargs)}
        given = {key: self.vllm_omni.get(key) for key in UNMERGEABLE}
        in_the_way = [f"{key}={value}" for key, value in given.items() if value not in (None, False, 1, "1")]
        if self.merge_lora and in_the_way:
            raise ConfigError(
                f"{self.KEY}.merge_lora=true adds the LoRA to whole, plain weights, which there are none of with "
                f"{self.KEY}.engine_kwargs.vllm_omni.{in_the_way[0]}; write {self.KEY}.merge_lora=false"
            )

    @property
    def vllm_omni(self) -> dict[str, Any]:
        """``engine_kwargs.vllm_omni`` without the keys that are null."""
        options: dict[str, Any] = self.engine_kwargs["vllm_omni"]
        return options

    def engine_options(self) -> dict[str, Any]:
        """What of ``engine_kwargs.vllm_omni`` goes to the engine as it is: all but `PLAN_KEYS`."""
        return {key: value for key, value in self.vllm_omni.items() if key not in PLAN_KEYS}

    def for_validation(self) -> DiffusionRolloutConfig:
        """A copy that samples as `val_kwargs` say."""
        val = self.val_kwargs
        names = ("num_inference_steps", "true_cfg_scale", "guidance_scale")
        changed = {name: getattr(val, name) for name in names if getattr(val, name) is not None}
        noise_level = self.algo.noise_level if val.noise_level is None else val.noise_level
        return dataclasses.replace(
            self,
            n=val.n,
            seed=val.seed,
            pipeline=dataclasses.replace(self.pipeline, **changed),
            algo=dataclasses.replace(self.algo, noise_level=noise_level),
        )


def check_engine_keys(options: Mapping[str, Any], known: Set[str]) -> None:
    """Raise :class:`ConfigError` for an engine option that is neither in `known` nor one of `PLAN_KEYS`."""
    prefix = f"{DiffusionRolloutConfig.KEY}.engine_kwargs.vllm_omni"
    names = {f"{prefix}.{name}" for name in {*known, *PLAN_KEYS} - MANAGED_KEYS.keys()}
    for key in options:
        if f"{prefix}.{key}" not in names:
            raise ConfigError(unknown_key(f"{prefix}.{key}", names))


def _engine_options(prefix: str, engine_kwargs: Any) -> dict[str, Any]:
    """The checked content of ``engine_kwargs.vllm_omni``, nulls left out."""
    for key in as_mapping(prefix, engine_kwargs):
        if key != "vllm_omni":
            raise ConfigError(unknown_key(f"{prefix}.{key}", [f"{prefix}.vllm_omni"]))
    given = as_mapping(f"{prefix}.vllm_omni", as_mapping(prefix, engine_kwargs).get("vllm_omni"))
    prefix += ".vllm_omni"
    for key in given:
        if key in MANAGED_KEYS:
            instead = f"write {MANAGED_KEYS[key]}=…" if MANAGED_KEYS[key] else "leave it out"
            raise ConfigError(f"{prefix}.{key} is set by the rollout itself; {instead}")
        if key not in PLAN_KEYS and (near := nearest(str(key), PLAN_KEYS, MISSPELT)):
            raise ConfigError(f"{prefix}.{key} is not a known key; did you mean {prefix}.{near}?")
    options = {str(key): value for key, value in given.items() if value is not None}
    checks: dict[str, Callable[[str, Any], Any]] = {
        "max_num_seqs": lambda key, value: integer(key, value, low=1, null="unset"),
        "step_execution": lambda key, value: flag(key, value, null="unset"),
        "request_batch_max_wait_ms": lambda key, value: number(key, value, low=0, null="no wait"),
        "rows_per_forward": lambda key, value: integer(key, value, low=1, null="all that are in flight"),
    }
    return options | {key: checks[key](f"{prefix}.{key}", options[key]) for key in PLAN_KEYS if key in options}
