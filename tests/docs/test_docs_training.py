"""The pages about training's settings: the reference is the generated one, and the formulas are what is computed."""

from __future__ import annotations

import math
import re
import statistics

import pytest
import torch

from tests.docs.pages import DOCS, block, blocks, code_spans, prose, table
from verl_omni.algorithms.flow_grpo import clipped_policy_loss, gaussian_kl, group_advantages
from verl_omni.algorithms.flow_sde import sde_coefficients, sde_step
from verl_omni.trainer import config_reference
from verl_omni.trainer.diffusion.diffusion_algos import get_diffusion_adv_estimator_fn, get_diffusion_loss_fn
from verl_omni.trainer.diffusion.settings import TrainSettings
from verl_omni.workers.config import DiffusionLossConfig

REFERENCE = DOCS / "reference/config.md"
FLOWGRPO = DOCS / "start/flowgrpo.md"
DEFAULTS = {key: default for section in config_reference.sections() for key, default, _ in section.rows}
SHORT = {key.removeprefix("actor_rollout_ref."): default for key, default in DEFAULTS.items()}


def test_the_reference_is_the_one_that_the_code_makes():
    want = config_reference.page()
    assert REFERENCE.read_text(encoding="utf-8") == want, f"run: {block(REFERENCE, 'bash', 'config_reference').strip()}"


def test_the_reference_has_each_key_once_with_a_meaning():
    rows = [row for section in config_reference.sections() for row in section.rows]
    assert all(meaning.endswith((".", "?", "!")) and "\n" not in meaning for _, _, meaning in rows)
    keys = [key for key, _, _ in rows if "NAME" not in key]
    assert len(keys) == len(set(keys))
    prefixes = {"actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "data", "algorithm"}
    prefixes |= {"actor_rollout_ref.ref", "reward", "trainer"}
    assert all(any(key.startswith(f"{prefix}.") for key in keys) for prefix in prefixes)
    assert {key for key, default in DEFAULTS.items() if default == "required" and "NAME" not in key} == {
        "actor_rollout_ref.model.path",
        "data.train_files",
    }


def test_every_key_in_the_texts_exists():
    known = {*SHORT, *DEFAULTS}
    known |= {key[:i] for key in known for i, c in enumerate(key) if c == "."}
    for page in (REFERENCE, FLOWGRPO):
        for span in code_spans(prose(page)):
            key = span.partition("=")[0]
            if re.fullmatch(r"(actor_rollout_ref|model|actor|rollout|ref|data|algorithm|reward|trainer)(\.\w+)+", key):
                assert key in known, f"{page.name}: {key}"


def test_the_symbols_are_the_keys_and_defaults_that_the_table_says():
    for _, key, default, _ in table(FLOWGRPO, "symbol", "key").rows:
        assert SHORT[code_spans(key)[0]] == code_spans(default)[0]


def evaluated(containing: str, **names: object) -> dict[str, object]:
    """The names after a block of formulas has run, in float64."""
    functions = {name: _elementwise(name) for name in ("sqrt", "log", "exp", "sin")}
    scope = {**functions, "pi": math.pi, **names}
    exec(block(FLOWGRPO, "python", containing), scope)
    return scope


def _elementwise(name: str):
    return lambda x: getattr(torch, name)(torch.as_tensor(x, dtype=torch.float64))


CONTAINING = {"sde": "std = a * sqrt(sigma", "cps": "image, pure_noise", "dance_sde": "score = "}


@pytest.mark.parametrize("sde_type", CONTAINING)
def test_the_steps_and_log_probs_are_those_of_the_page(sde_type):
    g = torch.Generator().manual_seed(0)
    x, v, eps = torch.randn(3, 2, 4, 5, generator=g, dtype=torch.float64)
    sigma, sigma_next = torch.tensor([0.8, 0.3]).double(), torch.tensor([0.7, 0.1]).double()
    coefficients = sde_coefficients(sigma, sigma_next, noise_level=0.7, sde_type=sde_type, second_sigma=0.9)
    result = sde_step(x.float(), v, type(coefficients)(*(c.float() for c in coefficients)), noise=eps.float())
    for row in range(2):
        want = evaluated(
            CONTAINING[sde_type],
            **dict(a=0.7, sigma=float(sigma[row]), sigma_next=float(sigma_next[row])),
            **dict(dt=float(sigma_next[row] - sigma[row]), x=x[row], v=v[row]),
            x_next=result.next_latents[row].double(),
        )
        assert torch.allclose(result.mean[row].double(), want["mean"], atol=1e-5)
        assert torch.allclose(result.next_latents[row].double(), want["mean"] + want["noise"] * eps[row], atol=1e-5)
        assert float(result.log_prob[row]) == pytest.approx(float(want["log_p"]), abs=1e-5)
        assert float(coefficients.std[row]) == pytest.approx(float(want["std"]))


def test_at_sigma_1_the_second_sigma_stands_in_as_the_page_says():
    assert "at sigma 1 the second sigma of the schedule stands in" in " ".join(prose(FLOWGRPO).split())
    one, after = torch.ones(1, dtype=torch.float64), torch.full((1,), 0.9, dtype=torch.float64)
    std = sde_coefficients(one, after, noise_level=0.7, sde_type="sde", second_sigma=0.9).std
    assert float(std) == pytest.approx(0.7 * math.sqrt(1 / (1 - 0.9)))


@pytest.mark.parametrize("global_std", [True, False])
def test_the_advantage_is_that_of_the_page(global_std):
    batch, groups = [0.1, 0.9, 0.4, 0.2, 0.2, 0.3], ["a", "a", "a", "b", "b", "b"]
    got = group_advantages(torch.tensor(batch), groups, global_std=global_std)
    for reward, group, advantage in zip(batch, groups, got.tolist(), strict=True):
        want = evaluated(
            "deviation =",
            **dict(reward=reward, batch=batch, group=[r for r, g in zip(batch, groups, strict=True) if g == group]),
            **dict(global_std=global_std, epsilon=1e-4, std=statistics.pstdev, mean=statistics.fmean),
        )
        assert advantage == pytest.approx(want["advantage"], abs=1e-5)


def test_the_loss_and_the_kl_term_are_those_of_the_page():
    advantages, change = [1.5, -0.5, -2.0, 1.0], [0.02, 0.02, -0.02, 0.001]
    got = clipped_policy_loss(torch.tensor(change), torch.zeros(4), torch.tensor(advantages), clip_ratio=1e-2).loss
    each = [
        evaluated("ratio = exp", log_p=d, old_log_p=0.0, advantage=a, c=1e-2)["loss"]
        for a, d in zip(advantages, change, strict=True)
    ]
    assert float(got) == pytest.approx(statistics.fmean(map(float, each)), abs=1e-6)
    mean, ref = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    kl = gaussian_kl(mean[None], ref[None], torch.tensor([0.4]))
    want = evaluated("kl = ", mean=mean.double(), mean_ref=ref.double(), std=0.4)["kl"]
    assert float(kl) == pytest.approx(float(want), rel=1e-5)


def test_the_file_of_the_page_registers_what_the_page_chooses():
    exec(block(FLOWGRPO, "python", "register_diffusion_loss"), {"__name__": "my_losses"})
    (loss_mode,) = re.findall(r"`actor\.diffusion_loss\.loss_mode=(\w+)`", FLOWGRPO.read_text())
    (estimator,) = re.findall(r"`algorithm\.adv_estimator=(\w+)`", FLOWGRPO.read_text())
    rewards = torch.tensor([[0.5], [1.0]])
    advantages, _ = get_diffusion_adv_estimator_fn(estimator)(rewards, ["a", "a"], epsilon=1e-4, config=None)
    assert torch.equal(advantages, rewards)
    log_prob = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], requires_grad=True)
    loss, metrics = get_diffusion_loss_fn(loss_mode).compute_loss(
        old_log_prob=log_prob.detach(),
        log_prob=log_prob,
        advantages=advantages.expand(2, 2),
        config=DiffusionLossConfig(),
        sample_weight=torch.tensor([1.0, 0.0]),
    )
    loss.backward()
    assert (float(loss.detach()), metrics) == (0.75, {})
    assert log_prob.grad.tolist() == [[-0.25, -0.25], [0.0, 0.0]]


def test_each_block_of_formulas_is_run_here():
    used = [*CONTAINING.values(), "deviation =", "ratio = exp", "kl = ", "register_diffusion_loss"]
    assert len(blocks(FLOWGRPO, language="python")) == len(used)


def test_a_group_needs_as_many_samples_as_the_page_says():
    assert "`rollout.n` must be at least 2" in prose(FLOWGRPO)
    mapping = {
        "actor_rollout_ref": {"model": {"path": "a/b"}, "rollout": {"n": 2}},
        "data": {"train_files": "prompts.txt"},
        "reward": {"scorers": {"light": {"type": "brightness"}}},
    }
    assert TrainSettings.from_mapping(mapping).actor_rollout_ref.rollout.n == 2
    mapping["actor_rollout_ref"]["rollout"]["n"] = 1
    with pytest.raises(ValueError, match=r"rollout\.n=1"):
        TrainSettings.from_mapping(mapping)
