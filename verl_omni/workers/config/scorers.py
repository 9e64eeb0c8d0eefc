"""Options of the scorers. Each type is a dataclass; `SCORER_TYPES` names them."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from verl_omni.workers.config.base import ConfigError, as_mapping, choice, flag, integer, number, path, text
from verl_omni.workers.config.user_function import load_function, taken_keywords

CHANNELS = ("red", "green", "blue")
TEMPLATE_FIELDS = ("prompt", "ground_truth")
"""What may stand in braces in `VlmConfig.prompt_template`."""
JUDGE = (
    "The image was made for this description: {prompt}\n"
    "Rate from 0 to 10 how well it shows what is described. Answer with one number only."
)


@dataclass(kw_only=True)
class ScorerConfig:
    """What each entry of ``reward.scorers`` has besides its type."""

    TYPE: ClassVar[str]

    weight: float = 1.0
    """Factor on the score in the sum; 0: the score is only logged."""

    def check(self, key: str) -> None:
        """Check and convert all values in place; `key` is the dotted key of the entry. Raises :class:`ConfigError`."""
        self.weight = number(f"{key}.weight", self.weight)


@dataclass(kw_only=True)
class OcrConfig(ScorerConfig):
    """How well the text in the image can be read: 1 − edit distance / length of the target, at least 0."""

    TYPE: ClassVar[str] = "ocr"

    ignore_extra_text: bool = False
    """Full score if the target is part of what is read; false: further text counts as errors."""
    min_confidence: float = 0.5
    """Lines that the reader is less sure of are left out."""

    def check(self, key: str) -> None:
        super().check(key)
        self.ignore_extra_text = flag(f"{key}.ignore_extra_text", self.ignore_extra_text)
        self.min_confidence = number(f"{key}.min_confidence", self.min_confidence, low=0, high=1)
        if missing := [name for name in ("rapidocr", "onnxruntime") if importlib.util.find_spec(name) is None]:
            raise ConfigError(f"{key}.type=ocr needs the package {missing[0]}: pip install {missing[0]}")


@dataclass(kw_only=True)
class JpegCompressibilityConfig(ScorerConfig):
    """Minus the size of the image as JPEG, in kB (1000 bytes)."""

    TYPE: ClassVar[str] = "jpeg_compressibility"

    quality: int = 95
    """Of the JPEG, 1 to 100."""

    def check(self, key: str) -> None:
        super().check(key)
        self.quality = integer(f"{key}.quality", self.quality, low=1)
        if self.quality > 100:
            raise ConfigError(f"{key}.quality={self.quality} must be at most 100")


@dataclass(kw_only=True)
class JpegIncompressibilityConfig(JpegCompressibilityConfig):
    """The size of the image as JPEG, in kB (1000 bytes)."""

    TYPE: ClassVar[str] = "jpeg_incompressibility"


@dataclass(kw_only=True)
class BrightnessConfig(ScorerConfig):
    """Mean of all pixels and channels, 0 (black) to 1 (white)."""

    TYPE: ClassVar[str] = "brightness"


@dataclass(kw_only=True)
class ColorConfig(ScorerConfig):
    """Mean of one channel minus the mean of the other two, -1 to 1."""

    TYPE: ClassVar[str] = "color"

    channel: str = "red"
    """red, green or blue."""

    def check(self, key: str) -> None:
        super().check(key)
        self.channel = choice(f"{key}.channel", self.channel, CHANNELS)


@dataclass(kw_only=True)
class FunctionConfig(ScorerConfig):
    """A Python function of your own."""

    TYPE: ClassVar[str] = "function"

    path: str
    """The .py file that holds it."""
    name: str = "compute_score"
    """Its name there."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for it."""

    def check(self, key: str) -> None:
        super().check(key)
        self.path, self.name = path(f"{key}.path", self.path), text(f"{key}.name", self.name)
        self.reward_kwargs = as_mapping(f"{key}.reward_kwargs", self.reward_kwargs)
        try:
            taken_keywords(load_function(self.path, self.name), self.reward_kwargs)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error


@dataclass(kw_only=True)
class EndpointConfig(ScorerConfig):
    """What scorers behind HTTP have in common."""

    api_key_env: str | None = None
    """Name of the environment variable that holds the bearer token; null: none is sent."""
    timeout_s: float = 60.0
    """Seconds for one attempt, from connecting to the last byte."""
    retries: int = 6
    """Further attempts after a connection error, a timeout, status 429 or 5xx. With the waits between them, 6 bridge
    half a minute in which nothing answers."""
    retry_wait_s: float = 1.0
    """Seconds before the first of them; twice as long before each next one, at most a minute, times 0.5 to 1."""
    max_concurrency: int = 32
    """Requests at a time."""
    max_reply_bytes: int = 1_000_000
    """A longer reply is an error."""
    max_image_bytes: int = 50_000_000
    """An image that is larger as a PNG is not sent, and an error. 4096 × 4096 pixels of pure noise are as much."""

    def check(self, key: str) -> None:
        super().check(key)
        self.timeout_s = number(f"{key}.timeout_s", self.timeout_s, above=0)
        self.retries = integer(f"{key}.retries", self.retries, low=0)
        self.retry_wait_s = number(f"{key}.retry_wait_s", self.retry_wait_s, low=0)
        self.max_concurrency = integer(f"{key}.max_concurrency", self.max_concurrency, low=1)
        self.max_reply_bytes = integer(f"{key}.max_reply_bytes", self.max_reply_bytes, low=1)
        self.max_image_bytes = integer(f"{key}.max_image_bytes", self.max_image_bytes, low=1)
        self.api_key_env = text(f"{key}.api_key_env", self.api_key_env, null="no key")
        if self.api_key_env is not None:
            secret = os.environ.get(self.api_key_env, "").strip()
            # Neither the name nor the value is shown: people put the key itself here by mistake.
            if not secret:
                raise ConfigError(f"{key}.api_key_env names an environment variable that is not set; export it first")
            if not (secret.isascii() and secret.isprintable()):
                raise ConfigError(f"{key}.api_key_env names a variable with characters that no HTTP header can hold")


@dataclass(kw_only=True)
class HttpConfig(EndpointConfig):
    """A service of your own that is sent the image and answers with a score."""

    TYPE: ClassVar[str] = "http"

    url: str
    """Where to POST; http or https."""
    score_key: str = "score"
    """Key of the number in the reply."""

    def check(self, key: str) -> None:
        super().check(key)
        self.url = _url(f"{key}.url", self.url)
        self.score_key = text(f"{key}.score_key", self.score_key)


@dataclass(kw_only=True)
class VlmConfig(EndpointConfig):
    """A vision-language model as judge, behind an OpenAI-compatible API."""

    TYPE: ClassVar[str] = "vlm"

    base_url: str
    """Of the API, such as http://localhost:8000/v1; ``/chat/completions`` is added."""
    model: str
    """Name of the model there."""
    prompt_template: str = JUDGE
    """The question; {prompt} and {ground_truth} are filled in."""
    scale: list[float] = field(default_factory=lambda: [0.0, 10.0])
    """[worst, best] answer, which become 0 and 1."""
    max_tokens: int = 64
    """Longest answer."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further keys of the request; these win over ours."""

    def check(self, key: str) -> None:
        super().check(key)
        self.base_url, self.model = _url(f"{key}.base_url", self.base_url), text(f"{key}.model", self.model)
        self.prompt_template = text(f"{key}.prompt_template", self.prompt_template)
        self.max_tokens = integer(f"{key}.max_tokens", self.max_tokens, low=1)
        self.extra_body = as_mapping(f"{key}.extra_body", self.extra_body)
        for name in re.findall(r"\{(\w+)\}", self.prompt_template):
            choice(f"{{…}} in {key}.prompt_template", name, TEMPLATE_FIELDS)
        if not (isinstance(self.scale, (list, tuple)) and len(self.scale) == 2):
            raise ConfigError(f"{key}.scale={self.scale!r} must be [worst, best]")
        self.scale = [number(f"{key}.scale", bound) for bound in self.scale]
        if not self.scale[0] < self.scale[1]:
            raise ConfigError(f"{key}.scale={self.scale!r} must rise; write a negative weight to turn a score round")


SCORER_TYPES: dict[str, type[ScorerConfig]] = {
    cls.TYPE: cls
    for cls in (
        OcrConfig,
        VlmConfig,
        HttpConfig,
        FunctionConfig,
        JpegCompressibilityConfig,
        JpegIncompressibilityConfig,
        BrightnessConfig,
        ColorConfig,
    )
}
"""``type`` of an entry → its options."""


def _url(key: str, value: Any) -> str:
    """`value` as an address without user and password. No message shows it, as there may be secrets in it."""
    try:
        parts = urlsplit(text(key, value).strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        usable = False
    if not usable:
        raise ConfigError(f"{key} must be an address such as http://localhost:8000/score")
    if "@" in parts.netloc:
        raise ConfigError(
            f"{key} holds a user or a password; put the secret into a variable and name it in api_key_env"
        )
    return value.strip()
