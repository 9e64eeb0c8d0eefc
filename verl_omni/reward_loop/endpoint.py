"""POSTs JSON and reads JSON, with a limit on everything: time, attempts, requests at a time, bytes of a reply.

However many requests fail while a service is down, the log tells that in two lines: when it goes, and when it is back.
With ``retries: 0`` nothing is tried again, and the errors alone tell it.
Redirects are not followed, as they would take the image and the key elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlsplit

from verl_omni.reward_loop.item import ScoreError
from verl_omni.utils.secrets import HIDDEN
from verl_omni.utils.text import one_line
from verl_omni.workers.config.scorers import EndpointConfig

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
"""Longest wait between two attempts."""
JSON_TYPES = ("application/json", "text/json", "text/plain", "application/octet-stream")
"""Content types of a reply that is read, beside those that end in +json; the last stands for none, and simple servers
send the third."""
SHOWN_REPLY = 200
"""Characters of a reply that an error shows."""


class _PassingError(Exception):
    """Another attempt may succeed."""


class Outage:
    """Whether a service is down: a request failed twice in a row, and no other was answered between.

    So a single failure among many answers is none, as of a service that is asked too often.
    """

    def __init__(self, shown_url: str) -> None:
        self._shown_url = shown_url
        self._is_down = False
        self._answers = self._failures = 0
        self._since = 0.0
        self._over = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """So long, but not beyond the end of an outage."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)

    def answered(self) -> None:
        """A request was answered, with a score or not. Logs the end of an outage."""
        if self._is_down:
            self._over.set()
            self._over = asyncio.Event()
            seconds = time.monotonic() - self._since
            text = "scorer %s answers again, %.1f s after it first did not; failed attempts: %d"
            logger.warning(text, self._shown_url, seconds, self._failures)
        self._answers += 1
        self._failures, self._is_down = 0, False

    def failed(self, reason: str, answers_before: int | None) -> int:
        """A request failed in a way that may pass. Logs the beginning of an outage.

        Returns the number of answers so far. `answers_before`: what it returned when the same request last failed;
        None: it did not.
        """
        self._since = self._since if self._failures else time.monotonic()
        self._failures += 1
        if answers_before == self._answers and not self._is_down:
            self._is_down = True
            logger.warning("scorer %s is down, it is tried again: %s", self._shown_url, reason)
        return self._answers


class Endpoint:
    """One address. Belongs to the event loop of its first request."""

    def __init__(self, url: str, config: EndpointConfig) -> None:
        self._url = url
        self._shown_url = urlsplit(url)._replace(query="", fragment="").geturl()  # a query may hold a secret
        self._config = config
        self._secret = os.environ.get(config.api_key_env, "").strip() if config.api_key_env else ""
        in_query = {value for _, value in parse_qsl(urlsplit(url).query)}
        secrets = {self._secret} | in_query | {quote(value, safe="") for value in in_query}
        self._hidden = sorted(secrets - {""}, key=len, reverse=True)
        self._outage = Outage(self._shown_url)
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, make_body: Callable[[], Any]) -> Any:
        """POST what `make_body` gives, and return the JSON of the reply.

        `make_body` runs in a thread, when the request's turn comes. Raises :class:`ScoreError` with the address, the
        number of attempts and the last reason.
        """
        async with self._slots:
            body = await asyncio.to_thread(lambda: json.dumps(make_body()).encode())
            attempts = self._config.retries + 1
            answers_before: int | None = None
            for attempt in range(1, attempts + 1):
                try:
                    return await self._attempt(body)
                except _PassingError as error:
                    reason = str(error)
                    answers_before = self._outage.failed(reason, answers_before)
                    logger.debug("POST %s, attempt %d of %d: %s", self._shown_url, attempt, attempts, reason)
                if attempt < attempts:
                    await self._outage.wait(wait_before_retry(attempt, self._config.retry_wait_s))
        raise ScoreError(f"POST {self._shown_url} failed {attempts} times, the last time with {reason}")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _attempt(self, body: bytes) -> Any:
        import aiohttp

        session = self._session = self._session or self._open()
        try:
            async with session.post(self._url, data=body, allow_redirects=False) as response:
                content = await self._read(response)
                status, kind = response.status, response.content_type
        except TimeoutError as error:
            raise _PassingError(f"no reply within timeout_s={self._config.timeout_s:g}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _PassingError(self._told(f"{type(error).__name__}: {error}")) from error
        if _may_pass(status):
            raise _PassingError(self._told(f"status {status}: {_text(content)}"))
        self._outage.answered()
        if not 200 <= status < 300:
            said = self._told(f"status {status}: {_text(content)}")
            raise ScoreError(f"POST {self._shown_url} was refused with {said}")
        if kind not in JSON_TYPES and not kind.endswith("+json"):
            raise ScoreError(
                f"POST {self._shown_url} gave a reply of type {kind:.80}; it must be JSON, with the header "
                "Content-Type: application/json"
            )
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            said = self._told(_text(content))
            raise ScoreError(f"POST {self._shown_url} gave a reply that is no JSON: {said}") from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > self._config.max_reply_bytes:
                if _may_pass(response.status):
                    break  # an error shows only the beginning
                self._outage.answered()
                raise ScoreError(
                    f"POST {self._shown_url} gave a reply of more than max_reply_bytes={self._config.max_reply_bytes}"
                )
        return bytes(content)

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        # a compressed reply can be small on its way and fill the memory here
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        return aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=self._config.timeout_s),
            connector=aiohttp.TCPConnector(limit=0),  # the semaphore is the limit
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _told(self, text: str) -> str:
        """`text`, short, in one line, without the key and what the address holds, should the other side repeat it."""
        for secret in self._hidden:
            text = text.replace(secret, HIDDEN)
        text = one_line(text)
        return text if len(text) <= SHOWN_REPLY else f"{text[:SHOWN_REPLY]}…"


def _may_pass(status: int) -> bool:
    return status == 429 or status >= 500


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def wait_before_retry(attempt: int, first_s: float) -> float:
    """Seconds to wait after the attempt of that number (1, 2, …) failed: `first_s` doubled each time, with jitter."""
    return min(first_s * 2.0 ** min(attempt - 1, 30), MAX_WAIT_S) * random.uniform(0.5, 1.0)
