"""RLOO's advantages and loss: closed forms, on the file's own functions."""

from types import SimpleNamespace

import pytest
import torch

import rloo_multiturn as rloo


def make_args(**changes):
    return SimpleNamespace(**{"group_size": 2, "kl_coef": 0.0, "dense_reward": False, **changes})


def make_batch(rewards, lengths, valid=None, logprobs=None, ref_logprobs=None):
    """Episodes whose action tokens are given as `lengths[i][k]`, the number of tokens of turn k; one observation token
    stands before each action."""
    rows = [[(k, j > 0) for k, n in enumerate(turns) for j in range(n + 1)] for turns in lengths]
    T = max(map(len, rows))
    turn_ids, mask = torch.zeros(len(rows), T, dtype=torch.long), torch.zeros(len(rows), T, dtype=torch.bool)
    for i, row in enumerate(rows):
        for t, (k, is_action) in enumerate(row):
            turn_ids[i, t], mask[i, t] = (k if is_action else 0), is_action
    rewards = torch.tensor(rewards, dtype=torch.float64)
    zeros = torch.zeros(len(rows), T, dtype=torch.float64)
    return {
        "rewards": rewards,
        "turn_ids": turn_ids,
        "response_mask": mask,
        "num_turns": torch.tensor([len(turns) for turns in lengths]),
        "valid": torch.tensor(valid or [True] * len(rows)),
        "logprobs": zeros if logprobs is None else logprobs,
        "ref_logprobs": zeros if ref_logprobs is None else ref_logprobs,
    }


def brute_force(batch, args):
    """Equations (2)-(4) with plain loops."""
    B, K = batch["rewards"].shape
    G = args.group_size
    r = batch["rewards"].clone()
    for i in range(B):
        for t in range(batch["turn_ids"].shape[1]):
            if batch["response_mask"][i, t]:
                kl = batch["logprobs"][i, t] - batch["ref_logprobs"][i, t]
                r[i, batch["turn_ids"][i, t]] -= args.kl_coef * kl
    advantages = torch.zeros_like(batch["logprobs"])
    for i in range(B):
        others = [j for j in range(i // G * G, i // G * G + G) if j != i and batch["valid"][j]]
        for t in range(advantages.shape[1]):
            if batch["response_mask"][i, t] and others and batch["valid"][i]:
                k = batch["turn_ids"][i, t] if args.dense_reward else 0
                advantages[i, t] = r[i, k:].sum() - sum(r[j, k:].sum() for j in others) / len(others)
    return advantages


def test_one_score_per_episode_on_all_its_action_tokens():
    """Episodes of 3 turns and of 1 turn with returns 1 and 0 give +1 and -1 on all their action tokens."""
    batch = make_batch([[0, 0, 1.0], [0, 0, 0]], [[2, 1, 3], [4]])
    advantages = rloo.compute_advantages(batch, make_args())["advantages"]
    assert (advantages[0][batch["response_mask"][0]] == 1).all() and (
        advantages[1][batch["response_mask"][1]] == -1
    ).all()
    assert (advantages[~batch["response_mask"]] == 0).all()


@pytest.mark.parametrize("dense_reward", [False, True])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_advantages_equal_the_equations(dense_reward, kl_coef):
    torch.manual_seed(0)
    lengths = [[2, 1, 3], [4], [1, 1], [3, 2, 1], [1], [2, 2]]
    rewards = [[0.1, 0.2, 0.7], [0.3, 0, 0], [0.5, -0.5, 0], [0, 0, 0], [1.0, 0, 0], [0.25, 0.5, 0]]
    batch = make_batch(rewards, lengths)
    batch["logprobs"] = -torch.rand_like(batch["logprobs"]) * batch["response_mask"]
    batch["ref_logprobs"] = -torch.rand_like(batch["logprobs"]) * batch["response_mask"]
    args = make_args(group_size=3, dense_reward=dense_reward, kl_coef=kl_coef)
    assert torch.allclose(rloo.compute_advantages(batch, args)["advantages"], brute_force(batch, args))


def test_dense_reward_reaches_back_across_observations_but_not_forward():
    """A turn is credited with what comes after it; what was earned before it is not its doing."""
    batch = make_batch([[0.5, 0.5], [0, 0]], [[1, 1], [1, 1]])
    advantages = rloo.compute_advantages(batch, make_args(dense_reward=True))["advantages"]
    assert advantages[0].tolist() == [0, 1.0, 0, 0.5] and advantages[1].tolist() == [0, -1.0, 0, -0.5]


def test_ended_episode_counts_zero_in_the_baseline():
    batch = make_batch([[1.0, 0], [0, 0.5]], [[1], [1, 1]])
    advantages = rloo.compute_advantages(batch, make_args(dense_reward=True))["advantages"]
    assert advantages[1].tolist() == [0, -0.5, 0, 0.5]  # turn 0: 0.5 - 1; turn 1: 0.5 - 0


def test_group_without_variance_gives_no_gradient():
    """Exactly none for rewards of 0 and 1, none up to rounding for others."""
    for value in (0.0, 1.0, 0.1, 0.7):
        batch = make_batch([[value], [value], [value]], [[2], [1], [3]])
        batch["rewards"] = batch["rewards"].float()
        advantages = rloo.compute_advantages(batch, make_args(group_size=3))["advantages"]
        assert (advantages.abs() <= (1e-6 if value % 1 else 0)).all()


def test_infrastructure_error_leaves_loss_and_baseline():
    args = make_args(group_size=3)
    with_error = make_batch([[1.0], [0.0], [0.0]], [[2], [2], [2]], valid=[True, False, True])
    with_error["response_mask"][1] = False  # as the rollout returns it
    advantages = rloo.compute_advantages(with_error, args)["advantages"]
    assert advantages[0].tolist() == [0, 1, 1] and advantages[2].tolist() == [0, -1, -1]  # not 1 - 0/2
    assert (advantages[1] == 0).all()
    alone = make_batch([[1.0], [0.0], [0.0]], [[2], [2], [2]], valid=[True, False, False])
    assert (rloo.compute_advantages(alone, args)["advantages"] == 0).all()


def test_loss_is_a_token_sum_with_a_constant_divisor():
    """(5): neither the length of an episode nor the batch's number of tokens divides."""
    batch = make_batch([[1.0], [0.0]], [[4], [1]])
    batch |= rloo.compute_advantages(batch, make_args())
    batch["new_logprobs"] = torch.full_like(batch["advantages"], -0.5, requires_grad=True)
    loss, sums = rloo.compute_loss(batch | {"num_episodes": 2, "num_tokens": 5}, make_args())
    assert loss.item() == pytest.approx(-(4 * 1 * -0.5 + 1 * -1 * -0.5) / 2)
    assert sums["policy_loss"] == pytest.approx(loss.item())
    loss.backward()
    expected = torch.tensor([[0, -0.5, -0.5, -0.5, -0.5], [0, 0.5, 0, 0, 0]], dtype=torch.float64)
    assert torch.equal(batch["new_logprobs"].grad, expected)
