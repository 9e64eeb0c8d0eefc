"""The real reader on drawn text."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.reward_loop.items import item, noise, plain, score, written
from verl_omni.reward_loop import RewardError, RewardManager
from verl_omni.reward_loop.ocr import OcrScorer, bgr_pixels
from verl_omni.workers.config.reward import RewardConfig
from verl_omni.workers.config.scorers import OcrConfig

pytestmark = pytest.mark.slow

OCR = {"ocr": {"type": "ocr"}}


@pytest.fixture(scope="module")
def reader() -> OcrScorer:
    return OcrScorer(OcrConfig())


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*args):
        raise AssertionError("the reader went to the network")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("text", ["HELLO 42", "New York", "fresh bread", "SALE 50%"])
def test_it_reads_what_is_written(reader, text):
    assert reader.score(item(written(text), prompt=f'a sign that says "{text}"')) == 1.0


def test_lines_are_read_from_top_to_bottom(reader):
    assert reader.read(item(written("Fresh bread\nevery day"))) == ["Fresh bread", "every day"]


def test_the_reader_gets_the_channels_in_its_own_order():
    pixels = bgr_pixels(plain(1, 2, 3, size=4))
    assert pixels.shape == (4, 4, 3) and pixels[0, 0].tolist() == [3, 2, 1]


def test_the_score_falls_with_each_wrong_letter(reader):
    image = written("HELLO 42")
    scores = [reader.score(item(image, ground_truth=text)) for text in ("HELLO 42", "HELLO 43", "HALLO 43", "zzzz")]
    assert scores == pytest.approx([1, 6 / 7, 5 / 7, 0])


@pytest.mark.parametrize("image", [plain(255, 255, 255), noise(64), plain(0, 0, 0, size=1)])
def test_nothing_to_read_scores_0(reader, image):
    assert reader.score(item(image, ground_truth="OPEN")) == 0.0


def test_further_text_counts_unless_it_is_ignored(reader):
    image, target = written("HELLO 42\nand more"), "HELLO 42"
    assert reader.score(item(image, ground_truth=target)) == 0.0  # 7 characters too many
    assert OcrScorer(OcrConfig(ignore_extra_text=True)).score(item(image, ground_truth=target)) == 1.0


def test_lines_below_the_confidence_are_left_out():
    sure = OcrScorer(OcrConfig(min_confidence=1.0))
    assert sure.read(item(written("HELLO 42"))) == []


async def test_several_threads_read_at_once_and_nothing_is_printed(capfd):
    texts = ["HELLO 42", "New York", "OPEN", "fresh bread"]
    async with RewardManager(RewardConfig(scorers=OCR, num_workers=2)) as manager:
        items = [item(written(text), request_id=text, ground_truth=text) for text in texts]
        blank = item(plain(9, 9, 9), ground_truth="OPEN")
        results = await asyncio.gather(*map(manager.score, [*items, blank]))
    assert [result.total for result in results] == [1, 1, 1, 1, 0]
    assert capfd.readouterr() == ("", "")


async def test_a_prompt_without_quotes_is_an_error():
    with pytest.raises(RewardError, match=r"scorer ocr could not score request r7: .*'a cat' has no text in quotes"):
        await score(item(prompt="a cat"), scorers=OCR)
