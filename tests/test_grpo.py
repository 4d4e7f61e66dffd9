"""GRPO's advantages and loss: closed forms, on the file's own functions."""

import math
from types import SimpleNamespace

import pytest
import torch

import grpo_multiturn as grpo
from tests.test_rloo import make_batch


def make_args(**changes):
    defaults = {"group_size": 3, "kl_coef": 0.0, "dense_reward": False, "norm_by_std": True, "length_norm": "episode"}
    return SimpleNamespace(**{**defaults, "clip_coef": 0.2, "max_turns": 3, "max_action_tokens": 4, **changes})


def advantages_of(rewards, lengths, args, valid=None):
    batch = make_batch(rewards, lengths, valid=valid)
    return grpo.compute_advantages(batch, args)["advantages"], batch


def test_sparse_advantage_is_the_return_normalised_within_its_group():
    rewards = [[1.0, 0], [0, 0], [0, 0.5], [2.0, 0], [2.0, 0], [0, 0]]
    advantages, batch = advantages_of(rewards, [[2], [1, 3], [1, 1], [1], [2, 2], [4]], make_args())
    for group in (slice(0, 3), slice(3, 6)):
        R = torch.tensor(rewards[group], dtype=torch.float64).sum(1)
        expected = (R - R.mean()) / (R.std() + 1e-6)  # sample std
        for row, value in zip(range(group.start, group.stop), expected, strict=True):
            assert torch.allclose(advantages[row][batch["response_mask"][row]], value)
    assert (advantages[~batch["response_mask"]] == 0).all()


def test_dense_advantage_is_process_supervision():
    """Each turn's reward is normalised over all turns of the group, then summed from the turn on."""
    rewards, lengths = [[0.5, 0.25, 0.25], [0.5, -0.5, 0], [0, 0, 0]], [[1, 1, 1], [2, 1], [3]]
    advantages, batch = advantages_of(rewards, lengths, make_args(dense_reward=True))
    played = torch.tensor([0.5, 0.25, 0.25, 0.5, -0.5, 0.0], dtype=torch.float64)  # not the turns after the end
    normal = [
        [(r - played.mean()) / (played.std() + 1e-6) for r in row[: len(t)]]
        for row, t in zip(rewards, lengths, strict=True)
    ]
    for i, row in enumerate(normal):
        for t in batch["response_mask"][i].nonzero().flatten().tolist():
            assert advantages[i, t].item() == pytest.approx(float(sum(row[int(batch["turn_ids"][i, t]) :])))


def test_dr_grpo_leaves_the_standard_deviation_out():
    advantages, batch = advantages_of([[1.0], [0.0], [0.5]], [[1], [1], [1]], make_args(norm_by_std=False))
    assert advantages[:, 1].tolist() == pytest.approx([0.5, -0.5, 0.0])


def test_group_without_variance_gives_exactly_no_gradient():
    for dense in (False, True):
        advantages, _ = advantages_of([[1.0], [1.0], [1.0]], [[1], [2], [3]], make_args(dense_reward=dense))
        assert (advantages == 0).all()
    for value in (0.1, 1 / 3, 0.7):  # in float32 their mean is not quite the value
        batch = make_batch([[value] * 3] * 8, [[1, 2, 1]] * 8)
        batch |= {"rewards": batch["rewards"].float()}
        assert (grpo.compute_advantages(batch, make_args(dense_reward=True, group_size=8))["advantages"] == 0).all()


def test_infrastructure_error_leaves_mean_and_standard_deviation():
    lengths, valid = [[2], [2], [2]], [True, False, True]
    for dense in (False, True):
        advantages, _ = advantages_of([[1.0], [9.0], [0.0]], lengths, make_args(dense_reward=dense), valid)
        assert advantages[0, 1].item() == pytest.approx(0.5 / 0.5**0.5, abs=1e-4) and (advantages[1] == 0).all()
        alone, _ = advantages_of([[1.0], [9.0], [0.0]], lengths, make_args(dense_reward=dense), [True, False, False])
        assert (alone == 0).all()


def loss_of(log_ratio, lengths, advantages, ref=0.0, **changes):
    batch = make_batch([[0.0]] * len(lengths), [[n] for n in lengths])
    mask = batch["response_mask"]
    batch["new_logprobs"] = torch.full(mask.shape, log_ratio, dtype=torch.float64) * mask
    batch["ref_logprobs"] = batch["new_logprobs"] + ref * mask
    batch["advantages"] = torch.tensor(advantages, dtype=torch.float64)[:, None] * mask
    counts = {"num_episodes": len(lengths), "num_tokens": int(mask.sum())}
    return grpo.compute_loss(batch | counts, make_args(**changes))


def test_length_normalisation_divides_each_episode_by_its_own_tokens():
    loss, _ = loss_of(0.0, [1, 4], [1.0, 3.0])
    assert loss.item() == pytest.approx(-(1.0 + 3.0) / 2)
    constant, _ = loss_of(0.0, [1, 4], [1.0, 3.0], length_norm="constant")
    assert constant.item() == pytest.approx(-(1.0 + 4 * 3.0) / 12 / 2)  # 3 turns of 4 tokens at most


def test_clipped_ratio_and_k3():
    up, sums = loss_of(0.5, [2], [1.0])
    down, _ = loss_of(0.5, [2], [-1.0])
    assert up.item() == pytest.approx(-1.2) and sums["clipfrac"] == 2
    assert sums["ratio"].item() == pytest.approx(2 * math.exp(0.5))
    assert sums["approx_kl"].item() == pytest.approx(2 * (math.exp(0.5) - 1 - 0.5))
    assert down.item() == pytest.approx(math.exp(0.5))
    assert loss_of(-0.5, [2], [-1.0])[0].item() == pytest.approx(0.8)  # below 1 - c with A < 0: clipped
    assert loss_of(-0.5, [2], [1.0])[0].item() == pytest.approx(-math.exp(-0.5))
    with_kl, _ = loss_of(0.0, [2], [0.0], ref=0.3, kl_coef=2.0)
    assert with_kl.item() == pytest.approx(2.0 * (math.exp(0.3) - 0.3 - 1), rel=1e-6)


def test_what_stands_outside_the_mask_is_ignored():
    """Padding and observations may hold anything, without an overflow in exp and without a gradient."""
    results = []
    for junk in (0.0, 1000.0):
        batch = make_batch([[1.0], [0.0]], [[1], [3]])
        batch["advantages"] = torch.tensor([[1.0], [-2.0]], dtype=torch.float64) * batch["response_mask"]
        for name, value in (("new_logprobs", -0.3), ("logprobs", -0.5), ("ref_logprobs", -0.4)):
            sign = -1 if name == "logprobs" else 1
            batch[name] = torch.where(batch["response_mask"], value, sign * junk).requires_grad_()
        counts = {"num_episodes": 2, "num_tokens": 4}
        loss, sums = grpo.compute_loss(batch | counts, make_args(kl_coef=0.5))
        (gradient,) = torch.autograd.grad(loss, batch["new_logprobs"])
        results.append([loss.item(), *(sums[name].item() for name in sorted(sums)), *gradient.flatten().tolist()])
    assert results[0] == pytest.approx(results[1]) and all(map(math.isfinite, results[1]))
