"""A decision process so small that every group of its episodes can be listed, and the expected gradient of an
estimator summed up exactly. The tests prove with it what is unbiased, and the benchmark measures what is not.

The process: a start s in {0, 1} is drawn. In each of two turns the agent says tokens, one or two of them: 0 ends the
action, 1 goes on, and after two tokens the action is cut. Ending the first turn at once ("0") ends the episode there,
so episodes differ in turns and in tokens. Between the turns the agent observes s once more, one token that it did not
choose.

    episode      tokens (observations in brackets)
    0            [s] 0
    1..6         [s] a_0 [s] a_1        a_0 in {10, 11}, a_1 in {0, 10, 11}

The policy is a table of logits, one row for each history in which a token is chosen.
"""

import itertools
from types import SimpleNamespace

import torch

ACTIONS = [(0,), (1, 0), (1, 1)]
STARTS = (0.3, 0.7)  # their probabilities
K = 2  # turns


def list_episodes() -> list[dict]:
    """All episodes of both starts: start, tokens, and per token its turn, whether it is an action token, and the row
    of the policy's table that chose it (-1 for an observation)."""
    contexts, episodes = {}, []
    for start in range(len(STARTS)):
        for actions in [(ACTIONS[0],), *itertools.product(ACTIONS[1:], ACTIONS)]:
            history, rows = (start,), []
            for turn, action in enumerate(actions):
                rows.append((start, 0, False, -1))  # the observation
                for token in action:
                    rows.append((token, turn, True, contexts.setdefault(history, len(contexts))))
                    history += (token,)
                history += ("obs",)
            tokens, turns, is_action, context = zip(*rows, strict=True)
            episode = {"start": start, "tokens": tokens, "turns": turns, "is_action": is_action, "context": context}
            episodes.append(episode | {"num_turns": len(actions)})
    return episodes


EPISODES = list_episodes()
NUM_CONTEXTS = 1 + max(max(episode["context"]) for episode in EPISODES)
T = max(len(episode["tokens"]) for episode in EPISODES)


def table(seed: int, scale: float = 1.0) -> torch.Tensor:
    """Logits of a policy, (contexts, 2) float64."""
    return scale * torch.randn(NUM_CONTEXTS, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rewards(dense: bool, seed: int = 5) -> torch.Tensor:
    """Rewards (episodes, K) float64: on every turn played, or 0/1 on the last one.

    A turn's reward depends on what was said up to then, not on what comes after; return-to-go relies on that.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn, r = {}, torch.zeros(len(EPISODES), K, dtype=torch.float64)
    for i, episode in enumerate(EPISODES):
        for turn in range(episode["num_turns"]):
            said = tuple(token for token, k in zip(episode["tokens"], episode["turns"], strict=True) if k <= turn)
            if said not in drawn:
                drawn[said] = torch.randn((), dtype=torch.float64, generator=generator)
            last = turn == episode["num_turns"] - 1
            r[i, turn] = drawn[said] if dense else float(last and drawn[said] > 0)
    return r


def make_batch(which: list[int], logits, ref_logits, r) -> dict:
    """The batch that a rollout of these episodes would have returned and scored, with `new_logprobs` of `logits`.

    Args:
        which: indices into EPISODES, groups in consecutive rows.
        logits, ref_logits: tables of the current and the reference policy.
        r: (episodes, K) rewards.
    """
    episodes = [EPISODES[i] for i in which]
    pad = lambda name, fill: torch.tensor([[*e[name]] + [fill] * (T - len(e[name])) for e in episodes])  # noqa: E731
    batch = {
        "input_ids": pad("tokens", 0),
        "context": pad("context", -1),
        "response_mask": pad("is_action", False),
        "attention_mask": torch.arange(T) < torch.tensor([[len(e["tokens"])] for e in episodes]),
        "turn_ids": pad("turns", 0) * pad("is_action", False),
        "rewards": r[which],
        "num_turns": torch.tensor([e["num_turns"] for e in episodes]),
        "valid": torch.ones(len(episodes), dtype=torch.bool),
    }
    batch["logprobs"] = batch["sampler_logprobs"] = score(logits, batch).detach()
    return batch | {"ref_logprobs": score(ref_logits, batch).detach(), "new_logprobs": score(logits, batch)}


def score(logits, batch: dict) -> torch.Tensor:
    """Log-probabilities of the batch's action tokens under a table, (B, T); 0 elsewhere."""
    chosen = torch.log_softmax(logits, -1)[batch["context"].clamp(min=0), batch["input_ids"]]
    return torch.where(batch["response_mask"], chosen, 0.0)


def episode_probabilities(logits) -> torch.Tensor:
    """(episodes,) probability of each episode given its start."""
    batch = make_batch(list(range(len(EPISODES))), logits, logits, rewards(False))
    return batch["new_logprobs"].sum(1).exp()


def exact_gradient(logits, ref_logits, r, kl_coef: float) -> torch.Tensor:
    """Gradient of J = E[return - kl_coef * KL(pi | pi_ref)] by summing over all episodes; same shape as the table."""
    theta = logits.clone().requires_grad_()
    batch = make_batch(list(range(len(EPISODES))), theta, ref_logits, r)
    start = torch.tensor([STARTS[e["start"]] for e in EPISODES], dtype=torch.float64)
    kl = (batch["new_logprobs"] - batch["ref_logprobs"]).sum(1)
    J = (start * batch["new_logprobs"].sum(1).exp() * (r.sum(1) - kl_coef * kl)).sum()
    return torch.autograd.grad(J, theta)[0]


def groups(G: int):
    """Every group of G episodes that share a start, as a list of indices."""
    for start in range(len(STARTS)):
        here = [i for i, episode in enumerate(EPISODES) if episode["start"] == start]
        yield from (list(group) for group in itertools.product(here, repeat=G))


def expected_gradient(module, logits, ref_logits, r, args, estimate=None, moments: bool = False):
    """E[estimate] over all groups of `args.group_size` episodes drawn from `logits`, and its variance if asked for.

    Args:
        module: one of the algorithm files; its `compute_advantages` and `compute_loss` are called as they are.
        estimate: (module, batch, theta, args) -> ascent direction, same shape as the table; by default minus the
            gradient of the file's own loss.
        moments: also return the summed variance of the estimate's coordinates.
    """
    estimate = estimate or loss_gradient
    probability = episode_probabilities(logits)
    mean, square = torch.zeros_like(logits), 0.0
    for which in groups(args.group_size):
        weight = STARTS[EPISODES[which[0]]["start"]] * probability[which].prod()
        theta = logits.clone().requires_grad_()
        batch = make_batch(which, theta, ref_logits, r)
        direction = estimate(module, batch, theta, args)
        mean += weight * direction
        square += weight * (direction**2).sum()
    return (mean, float(square - (mean**2).sum())) if moments else mean


def loss_gradient(module, batch, theta, args):
    """Minus the gradient of the file's loss on one batch."""
    batch = batch | module.compute_advantages(batch, args)
    counts = {"num_episodes": len(batch["valid"]), "num_tokens": int(batch["response_mask"].sum())}
    loss, _ = module.compute_loss(batch | counts, args)
    if not loss.requires_grad:
        return torch.zeros_like(theta)
    return -torch.autograd.grad(loss, theta)[0]


def make_args(**changes) -> SimpleNamespace:
    """The arguments that the estimators read."""
    return SimpleNamespace(**{"group_size": 2, "kl_coef": 0.0, "dense_reward": False, **changes})


def relative_error(estimate, exact) -> float:
    return float((estimate - exact).norm() / exact.norm())


def cosine(a, b) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def true_values(logits, ref_logits, r, kl_coef: float) -> torch.Tensor:
    """(contexts,) expected rewards from each context on, under the current policy, by summing over all episodes."""
    batch = make_batch(list(range(len(EPISODES))), logits, ref_logits, r)
    mask, context = batch["response_mask"], batch["context"]
    probability = batch["logprobs"].sum(1).exp()
    total, weight = torch.zeros(2, NUM_CONTEXTS, dtype=torch.float64)
    for i in range(len(mask)):
        at = mask[i].nonzero().flatten().tolist()
        for t in at:
            to_go = sum(float(batch["rewards"][i, k]) for k in range(int(batch["turn_ids"][i, t]), K))
            to_go -= kl_coef * sum(float(batch["logprobs"][i, u] - batch["ref_logprobs"][i, u]) for u in at if u >= t)
            total[context[i, t]] += probability[i] * to_go
            weight[context[i, t]] += probability[i]
    return total / weight


def ppo_estimate(values, token_mean: bool = False):
    """PPO's first minibatch with a critic given as a table, (contexts,). The divisor is the number of episodes, which
    is constant, unless `token_mean` asks for the file's own, the batch's number of action tokens (times 3, about the
    mean length, to be of the same size)."""

    def estimate(module, batch, theta, args):
        batch["values"] = torch.where(batch["response_mask"], values[batch["context"].clamp(min=0)], 0.0)
        batch = batch | module.compute_advantages(batch, args)
        N = int(batch["response_mask"].sum()) / 3 if token_mean else len(batch["valid"])
        counts = {"num_tokens": N, "num_episodes": len(batch["valid"]), "iteration": args.critic_warmup}
        loss, _ = module.compute_loss(batch | counts, args)
        return -torch.autograd.grad(loss, theta)[0]

    return estimate
