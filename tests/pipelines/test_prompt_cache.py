"""The prompt cache: once encoded while it is kept, bounded in bytes."""

from __future__ import annotations

import torch

from verl_omni.pipelines.prompt_cache import PromptCache


def test_the_least_recently_used_prompts_leave_when_the_bytes_run_out():
    cache = PromptCache(max_bytes=3 * 40)
    calls = []

    def get(key):
        def encode():
            calls.append(key)
            return {"prompt_embeds": torch.full((10,), float(key))}

        embeds, computed = cache.get(key, encode)
        assert computed == (calls[-1:] == [key] and len(calls) > before)
        return float(embeds["prompt_embeds"][0])

    for key in (1, 2, 3, 1, 4, 1, 2):
        before = len(calls)
        assert get(key) == key
    assert calls == [1, 2, 3, 4, 2]  # 4 pushed out 2, the oldest in use
    assert len(cache) == 3
    cache.clear()
    before = len(calls)
    get(1)
    assert calls[-1] == 1


def test_a_prompt_larger_than_the_cache_is_kept_until_the_next():
    cache = PromptCache(max_bytes=1)
    for key in (1, 2):
        assert cache.get(key, lambda: {"prompt_embeds": torch.zeros(10)})[1]
        assert len(cache) == 1
