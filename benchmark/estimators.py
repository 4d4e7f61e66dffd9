"""How biased and how noisy is each estimator? Exact expectations over every group of a small decision process.

    python benchmark/estimators.py

Writes estimators.csv and estimators.png beside this file. For an estimate g of the gradient of J:

    factor   <E[g], grad J> / |grad J|^2: a factor alone is no bias, the learning rate takes it up
    angle    between E[g] and grad J, in degrees: the bias that remains
    noise    sqrt(trace Cov[g]) / |E[g]|, of one batch: one group of G = 4 episodes

The last row is PPO's on a batch of 64 episodes, whose whitening and token mean are the batch's; it is sampled.
"""

import csv
import math
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import sys

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import grpo_multiturn as grpo
import ppo_multiturn as ppo
import rloo_multiturn as rloo
from benchmark import tabular

LOGITS, REFERENCE = tabular.table(1), tabular.table(2)
WRONG = torch.randn(tabular.NUM_CONTEXTS, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
GRPO = {"norm_by_std": True, "length_norm": "episode", "clip_coef": 0.2, "max_turns": 2, "max_action_tokens": 2}
PPO = {"gae_lambda": 1.0, "whiten_advantages": False, "clip_coef": 0.2, "vf_coef": 1.0, "critic_warmup": 0}


def list_estimators(dense: bool) -> list[tuple]:
    """(name, algorithm file, its arguments, its estimate if not the file's own loss as it is)."""
    true = tabular.true_values(LOGITS, REFERENCE, tabular.rewards(dense), 0.0)
    return [
        ("RLOO", rloo, {}, None),
        ("GRPO", grpo, GRPO, None),
        ("GRPO, std alone", grpo, GRPO | {"length_norm": "constant"}, None),
        ("GRPO, length alone", grpo, GRPO | {"norm_by_std": False}, None),
        ("Dr. GRPO", grpo, GRPO | {"norm_by_std": False, "length_norm": "constant"}, None),
        ("PPO, lambda 1, any critic", ppo, PPO, tabular.ppo_estimate(WRONG)),
        ("PPO, lambda 1, true critic", ppo, PPO, tabular.ppo_estimate(true)),
        ("PPO, lambda 0.9, wrong critic", ppo, PPO | {"gae_lambda": 0.9}, tabular.ppo_estimate(WRONG)),
        ("PPO, lambda 0.9, true critic", ppo, PPO | {"gae_lambda": 0.9}, tabular.ppo_estimate(true)),
        ("PPO, whitening alone", ppo, PPO | {"whiten_advantages": True}, tabular.ppo_estimate(true)),
        ("PPO, token mean alone", ppo, PPO, tabular.ppo_estimate(true, token_mean=True)),
        (
            "PPO, whitening and token mean",
            ppo,
            PPO | {"whiten_advantages": True},
            tabular.ppo_estimate(true, token_mean=True),
        ),
    ]


def large_batch(dense: bool, groups: int = 8, size: int = 8, batches: int = 200_000) -> tuple[torch.Tensor, float]:
    """E[g] and trace Cov[g] of PPO, whitening and token mean, from sampled batches of `groups` tasks x `size` episodes.

    There are 14 kinds of episodes, so a batch is how often each occurs, and g is a weighted sum of gradients per kind.
    """
    r, kinds = tabular.rewards(dense), len(tabular.EPISODES)
    theta = LOGITS.clone().requires_grad_()
    batch = tabular.make_batch(list(range(kinds)), theta, REFERENCE, r)
    mask, log_pi = batch["response_mask"].double(), batch["new_logprobs"]
    true = tabular.true_values(LOGITS, REFERENCE, r, 0.0)
    batch["values"] = torch.where(batch["response_mask"], true[batch["context"].clamp(min=0)], 0.0)
    A = ppo.compute_advantages(batch, tabular.make_args(dense_reward=dense, **PPO))["advantages"]  # (14, T)
    grad = lambda loss: torch.autograd.grad(loss, theta, retain_graph=True)[0].flatten()  # noqa: E731
    weighted, plain = (torch.stack([grad(x) for x in (w * log_pi).sum(1)]) for w in (A, mask))  # (14, parameters)
    starts = torch.tensor([episode["start"] for episode in tabular.EPISODES])
    probabilities = tabular.episode_probabilities(LOGITS)  # (14,), given the start
    torch.manual_seed(0)
    counts = torch.zeros(batches, kinds, dtype=torch.float64)
    for _ in range(groups):
        start = (torch.rand(batches) < tabular.STARTS[1]).long()
        for s in (0, 1):
            here = torch.distributions.Multinomial(size, probabilities * (starts == s))
            counts[start == s] += here.sample((int((start == s).sum()),))
    N = (counts @ mask.sum(1))[:, None]  # (batches, 1) action tokens
    mean = (counts @ (A * mask).sum(1))[:, None] / N
    std = ((counts @ (A * A * mask).sum(1))[:, None] - N * mean**2).clamp(min=0).div(N - 1).sqrt() + 1e-8
    g = (counts @ weighted - mean * (counts @ plain)) / std / N * 3  # (batches, parameters); 3 as in `ppo_estimate`
    return g.mean(0).view_as(LOGITS), float(g.var(0).sum())


def main() -> None:
    rows = []
    for dense in (False, True):
        r = tabular.rewards(dense)
        exact = tabular.exact_gradient(LOGITS, REFERENCE, r, 0.0)
        moments = {}
        for name, module, changes, estimate in list_estimators(dense):
            args = tabular.make_args(group_size=4, dense_reward=dense, **changes)
            moments[name] = tabular.expected_gradient(module, LOGITS, REFERENCE, r, args, estimate, moments=True)
        moments["PPO, the same, 8 groups of 8"] = large_batch(dense)
        for name, (mean, variance) in moments.items():
            cosine = min(1.0, tabular.cosine(mean, exact))
            row = {"reward": "dense" if dense else "sparse", "estimator": name}
            row |= {"factor": f"{float((mean * exact).sum() / (exact**2).sum()):.3f}"}
            row |= {"angle": f"{math.degrees(math.acos(cosine)):.2f}", "noise": f"{variance**0.5 / mean.norm():.2f}"}
            rows.append(row)
            print(row, flush=True)
    with (HERE / "estimators.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    draw(rows)


def draw(rows: list[dict]) -> None:
    """Angle and noise of each estimator, sparse and dense side by side."""
    names = [row["estimator"] for row in rows if row["reward"] == "sparse"]
    fig, axes = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for ax, quantity, label in zip(axes, ("angle", "noise"), ("bias: degrees off", "noise of one batch"), strict=True):
        for shift, reward, color in ((0.2, "sparse", "#12507b"), (-0.2, "dense", "#d08a2e")):
            values = [float(row[quantity]) for row in rows if row["reward"] == reward]
            ax.barh([i + shift for i in range(len(names))], values, 0.38, color=color, label=reward)
        ax.set(yticks=range(len(names)), yticklabels=names, xlabel=label)
        ax.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    axes[0].legend()
    fig.tight_layout()
    fig.savefig(HERE / "estimators.png", dpi=130)


if __name__ == "__main__":
    main()
