"""PPO's advantages, values and loss: closed forms, on the file's own functions."""

import math
from types import SimpleNamespace

import pytest
import torch

import ppo_multiturn as ppo
from tests.test_rloo import make_batch


def make_args(**changes):
    defaults = {"kl_coef": 0.0, "gae_lambda": 0.9, "whiten_advantages": False, "clip_coef": 0.2}
    return SimpleNamespace(
        **{**defaults, "vf_coef": 1.0, "critic_warmup": 0, "group_size": 2, "dtype": "float32", **changes}
    )


def random_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    K = max(map(len, lengths))
    rewards = torch.zeros(len(lengths), K, dtype=torch.float64)
    for i, turns in enumerate(lengths):
        rewards[i, : len(turns)] = torch.randn(len(turns), dtype=torch.float64, generator=generator)
    batch = make_batch(rewards.tolist(), lengths)
    for name in ("values", "logprobs", "ref_logprobs"):
        noise = torch.randn(batch["response_mask"].shape, dtype=torch.float64, generator=generator)
        batch[name] = noise * batch["response_mask"]
    return batch


def brute_force_gae(batch, i, gae_lambda, kl_coef):
    """A_t = sum_l lambda^l delta_{t+l} over the action tokens of episode i, as a plain double sum; by position."""
    at = batch["response_mask"][i].nonzero().flatten().tolist()
    turns = [int(batch["turn_ids"][i, t]) for t in at]
    r = [-kl_coef * float(batch["logprobs"][i, t] - batch["ref_logprobs"][i, t]) for t in at]
    for n, k in enumerate(turns):
        if n + 1 == len(at) or turns[n + 1] != k:
            r[n] += float(batch["rewards"][i, k])
    V = [float(batch["values"][i, t]) for t in at] + [0.0]
    delta = [r[n] + V[n + 1] - V[n] for n in range(len(at))]
    return {t: sum(gae_lambda ** (m - n) * delta[m] for m in range(n, len(at))) for n, t in enumerate(at)}


@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_gae_equals_the_brute_force_sum(gae_lambda, kl_coef):
    lengths = [[2, 1, 3], [4], [1, 1], [3, 2, 1]]
    batch = random_batch(lengths)
    out = ppo.compute_advantages(batch, make_args(gae_lambda=gae_lambda, kl_coef=kl_coef))
    for i in range(len(lengths)):
        expected = brute_force_gae(batch, i, gae_lambda, kl_coef)
        for t in range(batch["response_mask"].shape[1]):
            assert out["advantages"][i, t].item() == pytest.approx(expected.get(t, 0.0), abs=1e-12)
            want = expected[t] + float(batch["values"][i, t]) if t in expected else 0.0
            assert out["returns"][i, t].item() == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.7, 1.0])
def test_observation_tokens_change_no_advantage(gae_lambda):
    """Inserting any number of observation tokens, with any values at them, leaves the action tokens' advantages."""
    batch = random_batch([[2, 1, 3], [1, 2]])
    args = make_args(gae_lambda=gae_lambda)
    before = ppo.compute_advantages(batch, args)["advantages"][batch["response_mask"]]
    wide = {"rewards": batch["rewards"], "valid": batch["valid"]}
    for name in ("turn_ids", "response_mask", "values", "logprobs", "ref_logprobs"):
        columns = []
        for t in range(batch[name].shape[1]):
            junk = torch.full_like(batch[name][:, :1], 7 if name in ("values", "logprobs") else 0)
            columns += [junk] * (t % 4) + [batch[name][:, t : t + 1]]
        wide[name] = torch.cat(columns, 1)
    after = ppo.compute_advantages(wide, args)["advantages"][wide["response_mask"]]
    assert torch.allclose(before, after, atol=1e-12)


def test_value_at_a_masked_position_is_never_read():
    batch = random_batch([[2, 1], [1, 2, 1]])
    args = make_args()
    before = ppo.compute_advantages(batch, args)["advantages"]
    batch["values"] = torch.where(batch["response_mask"], batch["values"], 1e6)
    assert torch.allclose(before, ppo.compute_advantages(batch, args)["advantages"])


def test_reward_sits_on_the_last_action_token_of_its_turn():
    batch = make_batch([[1.0, 0.0], [0.0, 5.0]], [[3, 1], [1, 2]])
    batch["values"] = torch.zeros_like(batch["logprobs"])
    out = ppo.compute_advantages(batch, make_args(gae_lambda=0.0))["advantages"]
    assert out[0].tolist() == [0, 0, 0, 1, 0, 0] and out[1].tolist() == [0, 0, 0, 0, 5, 0]


def test_whitening_is_over_action_tokens_only():
    batch = random_batch([[2, 1, 3], [4], [1, 1]])
    out = ppo.compute_advantages(batch, make_args(whiten_advantages=True))["advantages"]
    chosen = out[batch["response_mask"]]
    assert chosen.mean().item() == pytest.approx(0, abs=1e-9) and chosen.std().item() == pytest.approx(1, abs=1e-6)
    assert (out[~batch["response_mask"]] == 0).all()


def test_value_is_of_the_history_before_its_token(tokenizer):
    class Positions(torch.nn.Module):
        """A "critic" that says at each position how many tokens it has read."""

        def forward(self, input_ids, **_):
            read = torch.arange(1, input_ids.shape[1] + 1, dtype=torch.float32)
            return SimpleNamespace(logits=read.expand(input_ids.shape)[..., None])

    mask = torch.tensor([[False, False, True, True, False, True]])
    values = ppo.token_values(Positions(), torch.zeros(1, 6, dtype=torch.long), mask, make_args())
    assert values.tolist() == [[0, 0, 2, 3, 0, 5]]  # before token t, t tokens have been read


def row(x):
    return torch.tensor([x], dtype=torch.float64)


def loss_of(new_logprobs, advantages, **changes):
    mask = torch.ones(1, len(new_logprobs), dtype=torch.bool)
    batch = {"response_mask": mask, "new_logprobs": row(new_logprobs), "logprobs": row([0.0] * len(new_logprobs))}
    batch |= {"advantages": row(advantages), "num_tokens": len(new_logprobs), "num_episodes": 1, "iteration": 5}
    return ppo.compute_loss(batch, make_args(**changes))


def test_clipped_surrogate():
    log = torch.tensor([0.1, 0.5, -0.5], dtype=torch.float64)
    loss, sums = loss_of(log.tolist(), [1.0, 1.0, 1.0])
    ratio = log.exp()
    policy = -(ratio[0] + 1.2 + ratio[2]) / 3  # above 1 + c: clipped; below 1 - c with A > 0: not
    assert loss.item() == pytest.approx(policy.item()) and sums["clipfrac"] == 2
    assert sums["approx_kl"].item() == pytest.approx((ratio - 1 - log).sum().item())
    loss, _ = loss_of(log.tolist(), [-1.0] * 3)
    assert loss.item() == pytest.approx((ratio[0] + ratio[1] + 0.8).item() / 3)  # A < 0: clipped below 1 - c alone


def test_clipped_value_loss():
    batch = {"values": row([0.0] * 4), "returns": row([1.0] * 4), "num_tokens": 6}  # another micro-batch has two more
    batch["response_mask"] = torch.tensor([[True, True, True, False]])
    new_values = row([0.1, 0.5, -0.5, 9.0])
    for vf_coef in (1.0, 0.3):
        loss = ppo.compute_value_loss(new_values, batch, make_args(vf_coef=vf_coef))
        # The larger of the plain and the clipped error, c = 0.2.
        assert loss.item() == pytest.approx(vf_coef * 0.5 * (0.9**2 + 0.8**2 + 1.5**2) / 6)


def test_policy_waits_while_the_critic_warms_up():
    loss, sums = loss_of([0.1], [1.0], critic_warmup=6)
    assert loss.item() == 0 and sums["policy_loss"].item() != 0
    loss, sums = loss_of([0.1], [1.0], critic_warmup=5)
    assert loss.item() == sums["policy_loss"].item()


def test_what_stands_outside_the_mask_is_ignored():
    """Padding and observations may hold anything, without an overflow in exp and without a gradient."""
    results = []
    mask = torch.tensor([[False, True, False, True]])
    for junk in (0.0, 1000.0):
        inside = {"new_logprobs": -0.3, "logprobs": -0.5, "values": 0.1, "new_values": 0.2, "returns": 1.0}
        batch = {"response_mask": mask, "advantages": mask * 1.5, "num_tokens": 2, "num_episodes": 1, "iteration": 5}
        for i, (name, value) in enumerate(inside.items()):
            batch[name] = torch.where(mask, value, (-1) ** i * junk).double().requires_grad_()
        loss, sums = ppo.compute_loss(batch, make_args())
        value_loss = ppo.compute_value_loss(batch["new_values"], batch, make_args())
        gradients = torch.autograd.grad(loss + value_loss, [batch["new_logprobs"], batch["new_values"]])
        numbers = [loss.item(), value_loss.item(), *(sums[name].item() for name in sorted(sums))]
        results.append(numbers + torch.cat(gradients, 1)[0].tolist())
    assert results[0] == pytest.approx(results[1]) and all(map(math.isfinite, results[1]))
