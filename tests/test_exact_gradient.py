"""Unbiased or not: expected gradients summed exactly, over every group of episodes of a small decision process.

Everything here calls the algorithm files' own `compute_advantages` and `compute_loss`, in float64.
"""

import csv
from pathlib import Path

import pytest
import torch

import grpo_multiturn as grpo
import ppo_multiturn as ppo
import rloo_multiturn as rloo
from benchmark import tabular

LOGITS, REFERENCE = tabular.table(1), tabular.table(2)


def test_process_has_turns_tokens_and_lengths_of_several_kinds():
    assert {e["num_turns"] for e in tabular.EPISODES} == {1, 2}
    assert {sum(e["is_action"]) for e in tabular.EPISODES} == {1, 3, 4}
    probability = tabular.episode_probabilities(LOGITS)
    for start in (0, 1):
        assert sum(
            p for p, e in zip(probability, tabular.EPISODES, strict=True) if e["start"] == start
        ) == pytest.approx(1)


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("dense_reward", [False, True])
@pytest.mark.parametrize("kl_coef", [0.0, 0.4])
def test_rloo_gradient_is_unbiased(group_size, dense_reward, kl_coef):
    r = tabular.rewards(dense_reward)
    args = tabular.make_args(group_size=group_size, dense_reward=dense_reward, kl_coef=kl_coef)
    exact = tabular.exact_gradient(LOGITS, REFERENCE, r, kl_coef)
    expected = tabular.expected_gradient(rloo, LOGITS, REFERENCE, r, args)
    assert tabular.relative_error(expected, exact) < 1e-9


def test_dense_rloo_has_less_variance_than_sparse_on_the_same_rewards():
    """Both are unbiased for any rewards; leaving out what came before a turn makes dense the better one here."""
    r = tabular.rewards(True)
    variance = {}
    for dense in (False, True):
        args = tabular.make_args(dense_reward=dense)
        mean, variance[dense] = tabular.expected_gradient(rloo, LOGITS, REFERENCE, r, args, moments=True)
        assert tabular.relative_error(mean, tabular.exact_gradient(LOGITS, REFERENCE, r, 0.0)) < 1e-9
    assert variance[True] < variance[False]


# Each departure that somebody might take for harmless. The test above would fail with it.


def batch_token_mean(module, batch, theta, args):
    batch = batch | module.compute_advantages(batch, args)
    loss = -(batch["advantages"] * batch["new_logprobs"]).sum() / batch["response_mask"].sum()
    return -torch.autograd.grad(loss, theta)[0] * 3  # a constant factor would be no bias


def episode_token_mean(module, batch, theta, args):
    batch = batch | module.compute_advantages(batch, args)
    per_episode = (batch["advantages"] * batch["new_logprobs"]).sum(1) / batch["response_mask"].sum(1)
    return torch.autograd.grad(per_episode.mean(), theta)[0] * 3


def self_included_baseline(module, batch, theta, args):
    R = batch["rewards"].sum(1)
    advantages = (R - R.mean())[:, None] * batch["response_mask"]
    return torch.autograd.grad((advantages * batch["new_logprobs"]).sum() / len(R), theta)[0]


def whitened_advantages(module, batch, theta, args):
    advantages = module.compute_advantages(batch, args)["advantages"]
    spread = advantages[batch["response_mask"]].std()
    return torch.autograd.grad((advantages / (spread + 1e-8) * batch["new_logprobs"]).sum() / len(advantages), theta)[0]


def kl_as_a_k1_loss(module, batch, theta, args):
    """The k1 estimate in the loss has zero mean gradient: the penalty is not there."""
    without = module.compute_advantages(batch | {"ref_logprobs": batch["logprobs"]}, args)["advantages"]
    k1 = (batch["new_logprobs"] - batch["ref_logprobs"]) * batch["response_mask"]
    objective = (without * batch["new_logprobs"]).sum() / len(without) - args.kl_coef * k1.sum() / len(without)
    return torch.autograd.grad(objective, theta)[0]


def expected_under(departure, kl_coef=0.0):
    """The departure's expected gradient, and the exact one."""
    args, r = tabular.make_args(group_size=2, kl_coef=kl_coef), tabular.rewards(False)
    exact = tabular.exact_gradient(LOGITS, REFERENCE, r, kl_coef)
    return tabular.expected_gradient(rloo, LOGITS, REFERENCE, r, args, estimate=departure), exact


@pytest.mark.parametrize(
    "departure", [batch_token_mean, episode_token_mean, whitened_advantages], ids=lambda f: f.__name__
)
def test_departure_from_rloo_turns_the_gradient(departure):
    assert tabular.cosine(*expected_under(departure)) < 0.9999  # a factor alone would be no bias


def test_kl_as_a_k1_loss_is_no_penalty():
    expected, exact = expected_under(kl_as_a_k1_loss, kl_coef=0.4)
    assert tabular.relative_error(expected, exact) > 0.02
    without = tabular.exact_gradient(LOGITS, REFERENCE, tabular.rewards(False), 0.0)
    assert torch.allclose(expected, without, atol=1e-12)


def test_self_included_baseline_only_shrinks_the_gradient():
    """By (G - 1) / G: the direction stays, so the mean-centring of Dr. GRPO is harmless up to the learning rate."""
    r, args = tabular.rewards(False), tabular.make_args(group_size=3)
    exact = tabular.exact_gradient(LOGITS, REFERENCE, r, 0.0)
    expected = tabular.expected_gradient(rloo, LOGITS, REFERENCE, r, args, estimate=self_included_baseline)
    assert torch.allclose(expected, exact * 2 / 3, atol=1e-12)


# GRPO ---------------------------------------------------------------------------------------------------------------


def grpo_args(**changes):
    defaults = {"norm_by_std": True, "length_norm": "episode", "clip_coef": 0.2, "max_turns": 2, "max_action_tokens": 2}
    return tabular.make_args(**{**defaults, **changes})


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("dense_reward", [False, True])
def test_grpo_gradient_is_not_even_parallel(group_size, dense_reward):
    r = tabular.rewards(dense_reward)
    exact = tabular.exact_gradient(LOGITS, REFERENCE, r, 0.0)
    args = grpo_args(group_size=group_size, dense_reward=dense_reward)
    expected = tabular.expected_gradient(grpo, LOGITS, REFERENCE, r, args)
    assert tabular.cosine(expected, exact) < 0.99


@pytest.mark.parametrize("alone", [{"length_norm": "constant"}, {"norm_by_std": False}], ids=["std", "length"])
def test_each_of_grpos_normalisations_alone_changes_the_direction(alone):
    """With real-valued returns: three rewards of 0 or 1 that differ have one standard deviation, which only scales."""
    r = tabular.rewards(True)
    exact = tabular.exact_gradient(LOGITS, REFERENCE, r, 0.0)
    expected = tabular.expected_gradient(grpo, LOGITS, REFERENCE, r, grpo_args(group_size=3, **alone))
    assert tabular.cosine(expected, exact) < 0.995


@pytest.mark.parametrize("group_size", [2, 3])
def test_dr_grpo_is_the_gradient_times_g_minus_1_over_g(group_size):
    r = tabular.rewards(False)
    args = grpo_args(group_size=group_size, norm_by_std=False, length_norm="constant")
    expected = tabular.expected_gradient(grpo, LOGITS, REFERENCE, r, args)
    constant = args.max_turns * args.max_action_tokens
    exact = tabular.exact_gradient(LOGITS, REFERENCE, r, 0.0)
    assert tabular.relative_error(expected * constant, exact * (group_size - 1) / group_size) < 1e-9


def test_k3_as_a_loss_has_the_gradient_of_the_reverse_kl():
    """That of KL(pi_ref | pi) at each visited history, how often it is visited being held constant."""
    beta, theta = 0.4, LOGITS.clone().requires_grad_()
    args = grpo_args(norm_by_std=False, length_norm="constant", kl_coef=beta)
    expected = tabular.expected_gradient(grpo, LOGITS, REFERENCE, torch.zeros_like(tabular.rewards(False)), args)
    every = tabular.make_batch(list(range(len(tabular.EPISODES))), LOGITS, LOGITS, tabular.rewards(False))
    start = torch.tensor([tabular.STARTS[e["start"]] for e in tabular.EPISODES], dtype=torch.float64)
    weight = (start * tabular.episode_probabilities(LOGITS))[:, None] * every["response_mask"]  # (episodes, T)
    visits = torch.zeros(len(LOGITS), dtype=torch.float64)
    visits.index_add_(0, every["context"].clamp(min=0).flatten(), weight.flatten())
    log_ratio = torch.log_softmax(REFERENCE, -1) - torch.log_softmax(theta, -1)
    reverse_kl = (visits[:, None] * REFERENCE.softmax(-1) * log_ratio).sum()
    exact = -beta * torch.autograd.grad(reverse_kl, theta)[0]
    assert tabular.relative_error(expected * args.max_turns * args.max_action_tokens, exact) < 1e-9


# PPO ----------------------------------------------------------------------------------------------------------------


def ppo_args(**changes):
    defaults = {"gae_lambda": 1.0, "whiten_advantages": False, "clip_coef": 0.2, "vf_coef": 1.0, "critic_warmup": 0}
    return tabular.make_args(**{**defaults, **changes})


WRONG = torch.randn(tabular.NUM_CONTEXTS, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def ppo_error(r, kl_coef, values, token_mean=False, **changes):
    args = ppo_args(kl_coef=kl_coef, **changes)
    exact = tabular.exact_gradient(LOGITS, REFERENCE, r, kl_coef)
    estimate = tabular.ppo_estimate(values, token_mean)
    return tabular.relative_error(tabular.expected_gradient(ppo, LOGITS, REFERENCE, r, args, estimate), exact)


@pytest.mark.parametrize("dense_reward", [False, True])
@pytest.mark.parametrize("kl_coef", [0.0, 0.4])
def test_ppo_is_unbiased_with_lambda_one_and_any_critic(dense_reward, kl_coef):
    assert ppo_error(tabular.rewards(dense_reward), kl_coef, WRONG) < 1e-9


@pytest.mark.parametrize("gae_lambda", [0.0, 0.9])
def test_ppo_with_lambda_below_one_is_as_good_as_its_critic(gae_lambda):
    r = tabular.rewards(True)
    assert ppo_error(r, 0.4, WRONG, gae_lambda=gae_lambda) > 0.02
    assert ppo_error(r, 0.4, tabular.true_values(LOGITS, REFERENCE, r, 0.4), gae_lambda=gae_lambda) < 1e-9


@pytest.mark.parametrize("alone", ["whitening", "batch-token mean"])
def test_each_of_ppos_normalisations_alone_is_a_bias(alone):
    r = tabular.rewards(False)
    if alone == "whitening":
        args = ppo_args(whiten_advantages=True)
        expected = tabular.expected_gradient(ppo, LOGITS, REFERENCE, r, args, tabular.ppo_estimate(WRONG))
    else:
        expected = tabular.expected_gradient(
            ppo, LOGITS, REFERENCE, r, ppo_args(), tabular.ppo_estimate(WRONG, token_mean=True)
        )
    exact = tabular.exact_gradient(LOGITS, REFERENCE, r, 0.0)
    assert tabular.cosine(expected, exact) < 0.9999  # not a matter of scale


def second_step(module, batch, theta, args):
    """The direction of the step after one of size 1 on the same batch, and the gradient of J where it is taken."""
    first = tabular.ppo_estimate(WRONG)(module, batch, theta, args)
    moved = (theta + first).detach().requires_grad_()
    again = batch | {"new_logprobs": tabular.score(moved, batch)}
    exact = tabular.exact_gradient(moved.detach(), REFERENCE, tabular.rewards(False), 0.0)
    return tabular.ppo_estimate(WRONG)(module, again, moved, args) - exact


def test_second_epoch_on_the_same_batch_is_biased_without_any_clip():
    error = tabular.expected_gradient(
        ppo, LOGITS, REFERENCE, tabular.rewards(False), ppo_args(clip_coef=1e9), second_step
    )
    exact = tabular.exact_gradient(LOGITS, REFERENCE, tabular.rewards(False), 0.0)
    assert error.norm() / exact.norm() > 0.02


def test_clip_alone_changes_the_expected_gradient():
    """On samples of a policy that is a little behind: the same samples, ratios and advantages, with and without."""

    def behind(module, batch, theta, args):
        batch["new_logprobs"] = tabular.score(theta + 0.3 * REFERENCE, batch)
        return tabular.ppo_estimate(WRONG)(module, batch, theta, args)

    r = tabular.rewards(False)
    free, clipped = (
        tabular.expected_gradient(ppo, LOGITS, REFERENCE, r, ppo_args(clip_coef=c), behind) for c in (1e9, 0.2)
    )
    assert tabular.relative_error(clipped, free) > 0.02


def test_documented_table_is_the_measured_one():
    root = Path(__file__).resolve().parents[1]
    text = (root / "docs" / "estimators.md").read_text()
    with (root / "benchmark" / "estimators.csv").open() as file:
        for row in csv.DictReader(file):
            line = next(x for x in text.splitlines() if x.startswith(f"| {row['estimator']} |"))
            cells = [cell.strip() for cell in line.split("|")[2:8]]
            there = cells[:3] if row["reward"] == "sparse" else cells[3:]
            assert there == [row["factor"], row["angle"], row["noise"]]
