"""RLOO for multi-turn language-model agents: the unbiased policy gradient, in one file.

A task is played as a conversation: the environment's observations are user messages, the policy's actions are
assistant messages. Episode i of a group of G on one task has turns k = 1..K_i, rewards r_{i,k}, and action tokens T_i;
k(t) is the turn of token t. The policy pi is the model's softmax at `--temperature`. We ascend

    (1)  J(theta) = E[ sum_k r_k - beta * sum_{t in T} (log pi(t) - log pi_ref(t)) ]        gamma = 1
    (2)  r~_{i,k} = r_{i,k} - beta * sum_{t in T_i, k(t) = k} (log pi(t) - log pi_ref(t))   KL (k1) in the reward
    (3)  R_{i,k}  = sum_{k'} r~_{i,k'}         sparse reward: the whole episode's return, whatever k
         R_{i,k}  = sum_{k' >= k} r~_{i,k'}    dense reward: the return to go; an ended episode counts 0
    (4)  A_{i,k}  = R_{i,k} - mean_{j != i} R_{j,k}                                         leave-one-out baseline
    (5)  grad J   = E[ 1/B sum_i sum_{t in T_i} A_{i,k(t)} grad log pi(t) ]

(5) is unbiased: the baseline is made of other episodes, the sum over tokens has a constant divisor, and the samples are
the current policy's own (one optimizer step per batch). Two conditions lie outside the equations. Sampler and trainer
must compute the same policy: float32 does, up to 1e-5 nats; bfloat16, the default on GPUs, does not quite (see
`estimator/sampler_mismatch`). And faults of an engine, which leave an episode out of B, must not depend on the actions.

Papers: RLOO, Ahmadian et al. 2024, arXiv 2402.14740; the setting, Wang & Ammanabrolu 2025, arXiv 2510.01132.
Shapes: B episodes, G group size, K turns, T padded tokens, V vocabulary.

    python rloo_multiturn.py --env alfworld --dense-reward
    python rloo_multiturn.py --env textworld --task w2-o3-q4 --model Qwen/Qwen2.5-1.5B-Instruct --learning-rate 1e-6
"""

import copy
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: lets the environment workers have the cores

import torch
import transformers
from tqdm import tqdm

import envs
import launch


@dataclass
class Args:
    # experiment
    exp_name: str = Path(__file__).stem
    """Name of this experiment; a part of the run folder's name."""
    seed: int = 1
    """Seed of the sampling, of the order of the tasks, and of the order of the episodes in an update."""
    save_freq: int = 5
    """Save a checkpoint every this many iterations; 0 saves at the end only, and when the run is interrupted."""
    resume: str = ""
    """Folder of a run to go on with from its newest checkpoint, with its arguments."""

    # environment
    env: Literal["textworld", "alfworld"] = "textworld"
    """Which engine to play."""
    task: str = ""
    """Which games: names separated by commas are mixed equally; empty takes w2-o3-q4 (TextWorld) or all (ALFWorld)."""
    dense_reward: bool = False
    """Reward every turn by its progress; otherwise 1 for the turn that wins and 0 for all others."""
    max_turns: int = 0
    """Turns in an episode at most; an episode that has not won by then has failed. 0 takes 12 (TextWorld) or 24."""
    max_action_tokens: int = 24
    """Tokens in an action at most; a longer one is cut and played as it is."""
    show_admissible: bool = False
    """Append the list of the commands that the engine would accept to each observation."""
    alfworld_data: Literal["auto", "real", "generated"] = "auto"
    """ALFWorld's own games, generated ones, or its own where $ALFWORLD_DATA or ~/.cache/alfworld has them."""
    num_workers: int = 2
    """Processes that run the environments."""
    max_infra_frac: float = 0.25
    """Share of a batch's episodes, lost to crashes and time-outs of environments, above which the run stops."""

    # model
    model: str = str(Path(__file__).parent / "checkpoints" / "tiny")
    """Folder or hub name of a causal language model with a chat template, e.g. Qwen/Qwen2.5-1.5B-Instruct."""
    temperature: float = 0.7
    """Softmax temperature of the policy, in sampling and in the loss alike."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation (the trained weights stay float32); auto takes bfloat16 on GPUs."""

    # optimisation
    num_iterations: int = 20
    """Iterations: a batch of episodes, then an update."""
    num_groups: int = 8
    """Tasks in a batch."""
    group_size: int = 8
    """Episodes on each task, G."""
    learning_rate: float = 3e-4
    """AdamW's learning rate."""
    anneal_lr: bool = True
    """Lower the policy's learning rate linearly, so that it would reach 0 after the last iteration."""
    kl_coef: float = 0.001
    """Weight beta of the KL divergence from the initial policy, in units of the advantage per nat; 0 leaves it out."""
    max_grad_norm: float = 1.0
    """Gradient norm above which the gradient is scaled down, after the estimator; 0 never does."""
    tokens_per_microbatch: int = 8192
    """Padded tokens in one forward and backward pass at most; changes memory and speed, never the result."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in the backward pass: less memory for one more forward pass; same result."""

    # evaluation
    eval_freq: int = 5
    """Evaluate every this many iterations, besides at the start and at the end; 0 leaves out those in between."""
    eval_episodes: int = 100
    """Held-out games in an evaluation, one episode each."""
    eval_temperature: float = 0.4
    """Softmax temperature in evaluation; 0 takes the most likely token."""
    eval_split: str = ""
    """Split to evaluate on; empty takes test (TextWorld) or valid_unseen (ALFWorld)."""

    # estimator
    # >>> ESTIMATOR: args
    update_epochs: int = 1
    """Passes over the batch; RLOO is unbiased with one only."""
    num_minibatches: int = 1
    """Optimizer steps in a pass; RLOO is unbiased with one only."""
    # <<< ESTIMATOR

    def __post_init__(self):
        self.task = self.task or envs.ENVIRONMENTS[self.env]["task"]
        self.eval_split = self.eval_split or envs.ENVIRONMENTS[self.env]["eval_split"]
        self.max_turns = self.max_turns or envs.ENVIRONMENTS[self.env]["max_turns"]
        if self.dtype == "auto":
            self.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        envs.check(self, "num_iterations num_groups max_turns max_action_tokens num_workers eval_episodes", at_least=1)
        envs.check(self, "seed save_freq max_infra_frac kl_coef max_grad_norm eval_freq eval_temperature", at_least=0)
        envs.check(self, "temperature learning_rate tokens_per_microbatch", above=0)
        envs.check(self, "group_size", at_least=2)  # an episode is compared with others on its task
        # >>> ESTIMATOR: checks
        # Unbiased on-policy only: a second optimizer step would use samples of a policy that is no longer current.
        if self.update_epochs != 1 or self.num_minibatches != 1:
            steps = f"--update-epochs {self.update_epochs} --num-minibatches {self.num_minibatches}"
            raise envs.UserError(f"{steps}: RLOO takes one optimizer step per batch, so both must be 1")
        # <<< ESTIMATOR


def token_logprobs(model, input_ids, response_mask, args) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the action tokens under the tempered policy, and the policy's entropy there.

    Right-padded rows need no attention mask: attention is causal, so no token ever sees the padding behind it.

    Args:
        input_ids: (B, T) int64, whole conversations.
        response_mask: (B, T) bool, True on tokens that the policy sampled; column 0 is False.

    Returns:
        logprobs (B, T) and entropy (B, T), float32, in nats; 0 wherever response_mask is False.
    """
    # The head runs only where the next token is an action token: position t - 1 predicts token t.
    predicts = response_mask.roll(-1, dims=1)  # (B, T); column 0 is False, so nothing wraps around
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0][predicts],))
    try:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]  # (1, T)
        logits = model(input_ids, position_ids=positions, use_cache=False).logits  # (N, V), N action tokens
    finally:
        hook.remove()
    all_logprobs = torch.log_softmax(logits.float() / args.temperature, dim=-1)  # (N, V)
    chosen = all_logprobs.gather(1, input_ids[response_mask][:, None]).squeeze(1)  # (N,)
    logprobs = torch.zeros(input_ids.shape, device=input_ids.device).masked_scatter(response_mask, chosen)
    surprise = -(all_logprobs.exp() * all_logprobs).sum(-1).detach()  # (N,)
    return logprobs, torch.zeros_like(logprobs).masked_scatter(response_mask, surprise)


# >>> ESTIMATOR: critic
# RLOO has no critic.
# <<< ESTIMATOR


def microbatches(batch: dict, rows: torch.Tensor, args):
    """Splits rows of the batch by length into pieces of at most `tokens_per_microbatch` padded tokens.

    Yields dicts of the batch's (B, T) and (B,) tensors, cut to the piece's rows and to its longest row.
    """
    lengths = batch["attention_mask"].sum(1)  # (B,)
    rows = rows[lengths[rows].argsort(descending=True, stable=True)]
    while len(rows):
        T = int(lengths[rows[0]])
        piece, rows = rows.split([n := min(len(rows), max(1, args.tokens_per_microbatch // T)), len(rows) - n])
        yield {name: x[piece, :T] if x.dim() == 2 else x[piece] for name, x in batch.items()} | {"rows": piece}


class KVCache(transformers.DynamicCache):
    """Attention keys and values of a batch of conversations, in preallocated buffers carried across turns.

    Slot p of a row holds the token at position p of its conversation. So a token may attend to the slots up to its own
    position, and what filler leaves behind a row's end is never seen: the row's next real token overwrites it first.
    A call of the model may be for some rows only; only theirs are then written and read.
    """

    def __init__(self, num_rows: int):
        super().__init__()
        self.num_rows = num_rows
        self.buffers = []  # per layer: keys and values, each (num_rows, heads, capacity, head_dim)

    def inputs(self, rows: torch.Tensor, positions: torch.Tensor) -> dict:
        """The model's arguments for new tokens of these rows, (b,) ascending, at these positions, (b, q)."""
        self.rows, self.positions, self.length = rows, positions, int(positions.max()) + 1
        mask = torch.arange(self.length, device=positions.device) <= positions[:, None, :, None]  # (b, 1, q, length)
        return {"position_ids": positions, "attention_mask": mask, "cache": self, "use_cache": True}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Called by each attention layer: stores (b, heads, q, head_dim), returns what may be attended to."""
        if layer_idx == len(self.buffers):
            sizes = [(self.num_rows, x.shape[1], 0, x.shape[3]) for x in (key_states, value_states)]
            self.buffers.append([key_states.new_zeros(size) for size in sizes])
        for i, new in enumerate((key_states, value_states)):
            buffer = self.buffers[layer_idx][i]
            if buffer.shape[2] < self.length:  # grow by half, so that copies stay rare
                buffer = torch.nn.functional.pad(buffer, (0, 0, 0, self.length * 3 // 2 - buffer.shape[2]))
                self.buffers[layer_idx][i] = buffer
            buffer[self.rows[:, None], :, self.positions] = new.transpose(1, 2)
        seen = [buffer[:, :, : self.length] for buffer in self.buffers[layer_idx]]
        return seen if len(self.rows) == self.num_rows else [x.index_select(0, self.rows) for x in seen]

    def select(self, rows: torch.Tensor) -> None:
        """Keeps these rows, in this order; a row may be named several times (a group's shared prompt)."""
        self.num_rows = len(rows)
        self.buffers = [[buffer.index_select(0, rows) for buffer in layer] for layer in self.buffers]


@torch.no_grad()
def rollout(model, chat, vec, tasks, args, temperature, generator) -> tuple[dict, list[dict]]:
    """Plays one episode per task with the tempered policy; with several processes each its tasks, for all to have.

    Token in, token out: the returned ids are the sampled ones, and each turn feeds the model only what is new, the
    last action's final token and the observation; the rest is in the cache.

    Returns:
        batch: input_ids (B, T) int64, attention_mask and response_mask (B, T) bool, logprobs (B, T) float32 in nats at
            sampling, turn_ids (B, T) int64 (the turn of an action token, else 0), rewards (B, K) float32, and per
            episode (B,): num_turns, won, terminated, truncated, context_limit, valid (False after an infrastructure
            error, which empties the row's response_mask).
        episodes: B dicts for people: task, won, progress, the observations, the actions and the rewards.
    """
    device, K = model.device, args.max_turns
    started = vec.reset(tasks)
    episodes = [
        {"task_id": task.task_id, "obs": [obs], "actions": [], "rewards": [], "infra_error": info.get("infra_error")}
        for task, (obs, info) in zip(tasks, started, strict=True)
    ]
    for episode in episodes:
        episode |= {"won": False, "progress": 0.0, "terminated": False, "truncated": False, "context_limit": False}
    ids = [chat.prompt(obs) for obs, _ in started]  # whole conversations; the lists below run in parallel to them
    if max(map(len, ids)) + args.max_action_tokens > model.config.max_position_embeddings:
        raise envs.UserError(f"--model {args.model}: its context is too short for the first prompt and an action")
    masks, turn_ids, logprobs = ([[fill] * len(x) for x in ids] for fill in (False, 0, 0.0))

    def forward(rows: torch.Tensor, block: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Reads the tokens `block` (b, q) of these rows at `positions` (b, q); the logits after each row."""
        return model(block, logits_to_keep=1, **cache.inputs(rows, positions)).logits[:, -1].float()  # (b, V)

    def feed(blocks: list[list[int]], read: list[int]) -> torch.Tensor:
        """Reads one block of new tokens per row behind the `read` ones; the logits after each, (N, V)."""
        lengths, read = torch.tensor(list(map(len, blocks)), device=device), torch.tensor(read, device=device)  # (N,)
        left, passes = torch.arange(len(blocks), device=device), []
        while len(left):  # blocks of half the longest or less wait for a pass of their own: filler costs as much
            q = int(lengths[left].max())
            short = lengths[left] <= q // 2
            rows, left = left[~short], left[short]
            block = [[chat.eot_id] * (q - len(blocks[i])) + blocks[i] for i in rows.tolist()]  # (b, q)
            # Blocks end together. The filler in front goes to the slot behind the row's end, where nobody looks.
            real = lengths[rows, None]  # (b, 1)
            order = torch.arange(q, device=device) - (q - real)  # (b, q): 0, 1, ... from the first real token on
            positions = read[rows, None] + torch.where(order >= 0, order, real)  # (b, q)
            passes.append((rows, forward(rows, torch.tensor(block, device=device), positions)))
        rows, logits = map(torch.cat, zip(*passes, strict=True))
        return logits[rows.argsort()]

    # The episodes of a group begin with the same prompt: it is read once.
    distinct = list(dict.fromkeys(map(tuple, ids)))
    cache = KVCache(len(distinct))
    logits = feed(list(map(list, distinct)), [0] * len(distinct))
    alive = [i for i in range(len(ids)) if not episodes[i]["infra_error"]]  # the episodes in the rows of the cache
    prompt_of = torch.tensor([distinct.index(tuple(ids[i])) for i in alive], dtype=torch.long, device=device)
    cache.select(prompt_of)
    logits = logits[prompt_of]  # (N, V), N episodes alive; b of them are in one call of the model
    for turn in range(K):
        # Sample one action per row, token by token. A row whose action has ended leaves the model's calls.
        read = torch.tensor([len(ids[i]) for i in alive], device=device)  # (N,) tokens in the cache
        rows = torch.arange(len(alive), device=device)  # (b,)
        for step in range(args.max_action_tokens):
            all_logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)  # (b, V)
            if temperature:
                token = torch.multinomial(all_logprobs.exp(), 1, generator=generator)  # (b, 1)
            else:
                token = logits.argmax(-1, keepdim=True)
            chosen = all_logprobs.gather(1, token)  # (b, 1)
            for row, token_id, logprob in zip(*(x.flatten().tolist() for x in (rows, token, chosen)), strict=True):
                for series, value in ((ids, token_id), (masks, True), (logprobs, logprob), (turn_ids, turn)):
                    series[alive[row]].append(value)
            going = token.squeeze(1) != chat.eot_id
            rows, token = rows[going], token[going]
            if step + 1 == args.max_action_tokens or not len(rows):
                break
            logits = forward(rows, token, read[rows, None] + step)
        actions = {i: chat.text(ids[i][n:]) for i, n in zip(alive, read.tolist(), strict=True)}

        # Step the environments; go on with the episodes that have not ended.
        rows, blocks = [], []
        for row, (i, answer) in enumerate(vec.step(actions).items()):
            obs, reward, terminated, truncated, info = answer
            episodes[i]["actions"].append(actions[i])
            episodes[i]["obs"].append(obs)
            episodes[i]["rewards"].append(reward)
            follow_up = chat.follow_up(obs, ended=ids[i][-1] == chat.eot_id)
            room = model.config.max_position_embeddings - len(ids[i]) - len(follow_up) - args.max_action_tokens
            full = room < 0 and not (terminated or truncated)  # out of context: a failure, like out of turns
            episodes[i] |= {"terminated": terminated, "truncated": truncated or full, "context_limit": full}
            episodes[i] |= {"won": info["won"], "progress": info["progress"], "infra_error": info.get("infra_error")}
            if not (terminated or truncated or full):
                blocks.append([ids[i][-1], *follow_up])  # the action's last token was sampled but not yet read
                rows.append(row)
                ids[i] += follow_up
                for series, fill in ((masks, False), (logprobs, 0.0), (turn_ids, 0)):
                    series[i] += [fill] * len(follow_up)
        if len(rows) < len(alive):
            cache.select(torch.tensor(rows, dtype=torch.long, device=device))
            alive = [alive[row] for row in rows]
        if not alive:
            break
        logits = feed(blocks, [len(ids[i]) - len(block) for i, block in zip(alive, blocks, strict=True)])

    ids, masks, turn_ids, logprobs, episodes = map(launch.gather, (ids, masks, turn_ids, logprobs, episodes))
    masks = [[x and not e["infra_error"] for x in mask] for mask, e in zip(masks, episodes, strict=True)]
    T = max(map(len, ids))
    pad_right = lambda rows, fill: torch.tensor([x + [fill] * (T - len(x)) for x in rows], device=device)  # noqa: E731
    per_episode = lambda name: torch.tensor([bool(e[name]) for e in episodes], device=device)  # noqa: E731
    batch = {
        "input_ids": pad_right(ids, chat.eot_id),
        "attention_mask": pad_right([[True] * len(x) for x in ids], False),
        "response_mask": pad_right(masks, False),
        "logprobs": pad_right(logprobs, 0.0),
        "turn_ids": pad_right(turn_ids, 0),
        "rewards": torch.tensor([e["rewards"] + [0.0] * (K - len(e["rewards"])) for e in episodes], device=device),
        "num_turns": torch.tensor([len(e["rewards"]) for e in episodes], device=device),
        "valid": ~per_episode("infra_error"),
    }
    batch |= {name: per_episode(name) for name in ("won", "terminated", "truncated", "context_limit")}
    return batch, episodes


def compute_advantages(batch: dict, args) -> dict:
    """Advantages of the action tokens, from the rewards and log-probabilities of a batch, by the equations at the top.

    Args:
        batch: rewards (B, K), turn_ids and response_mask (B, T), logprobs and ref_logprobs (B, T) in nats under the
            current and the reference policy, valid (B,). Groups are G consecutive rows.

    Returns:
        advantages (B, T) float32, 0 outside response_mask; with a critic also its targets, returns (B, T).
    """
    rewards, turn_ids, response_mask = batch["rewards"], batch["turn_ids"], batch["response_mask"]
    K = rewards.shape[1]
    # >>> ESTIMATOR: advantage
    # Unbiased: the KL penalty (k1) is a part of the reward, so the score function differentiates it. Eq. (2)
    kl = (batch["logprobs"] - batch["ref_logprobs"]) * response_mask  # (B, T)
    turn_kl = torch.zeros_like(rewards).scatter_add(1, turn_ids, kl.to(rewards.dtype))  # (B, K)
    shaped_rewards = rewards - args.kl_coef * turn_kl  # (B, K)
    # Unbiased: earlier turns' rewards do not depend on this turn's action, so leaving them out is allowed. Eq. (3)
    if args.dense_reward:
        R = shaped_rewards.flip(1).cumsum(1).flip(1)  # (B, K)
    else:
        R = shaped_rewards.sum(1, keepdim=True).expand(-1, K)  # (B, K)
    # Unbiased: the baseline is the mean of the *other* episodes of the group that were played to their end. Eq. (4)
    G = args.group_size
    valid = batch["valid"].view(-1, G, 1).to(R.dtype)  # (B/G, G, 1)
    R = R.view(-1, G, K) * valid  # (B/G, G, K)
    others = valid.sum(1, keepdim=True) - valid  # (B/G, G, 1): how many others each episode has
    baseline = (R.sum(1, keepdim=True) - R) / others.clamp(min=1)  # (B/G, G, K)
    turn_advantages = ((R - baseline) * valid * (others > 0)).view(-1, K)  # (B, K); an episode alone teaches nothing
    return {"advantages": turn_advantages.gather(1, turn_ids) * response_mask}
    # <<< ESTIMATOR


def compute_loss(batch: dict, args) -> tuple[torch.Tensor, dict]:
    """Loss of a micro-batch, such that the losses of all micro-batches of a step add up to the whole one.

    The batch has new_logprobs (B, T) with gradient, advantages and response_mask (B, T); num_episodes and num_tokens,
    the whole step's counts of valid episodes and of action tokens. Returns the loss, and sums for the metrics.
    """
    # >>> ESTIMATOR: loss
    # Unbiased: the sum over tokens has a constant divisor; a mean over the batch's tokens would divide by a random
    # number that depends on the actions. No ratio and no clip: the samples are the current policy's own. Eq. (5)
    loss = -(batch["advantages"] * batch["new_logprobs"]).sum() / batch["num_episodes"]
    return loss, {"policy_loss": loss.detach()}
    # <<< ESTIMATOR


def evaluate(model, chat, vec, tasks, args) -> tuple[dict, list[dict]]:
    """Plays each task once at `eval_temperature`, with random numbers of its own; infrastructure errors are left out.

    Returns success_rate with its 95 % Wilson interval (low, high), the mean return and turns; and the episodes.
    """
    generator = torch.Generator(model.device).manual_seed(args.seed + 1000 * launch.RANK)
    _, episodes = rollout(model, chat, vec, tasks, args, args.eval_temperature, generator)
    episodes = [episode for episode in episodes if not episode["infra_error"]]
    n, z = max(len(episodes), 1), 1.96
    p = sum(episode["won"] for episode in episodes) / n
    # Wilson 1927: the interval of success rates that would not be rejected by this outcome.
    center, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    scores = {
        "success_rate": p,
        "low": max(0.0, (center - half) / (1 + z * z / n)),  # rounding may leave -0
        "high": (center + half) / (1 + z * z / n),
        "episodic_return": sum(sum(episode["rewards"]) for episode in episodes) / n,
        "episodic_length": sum(len(episode["rewards"]) for episode in episodes) / n,
    }
    return scores, episodes


def main(args: Args) -> None:
    # 1. Games and model. Whatever is wrong with the arguments shows here, before any work.
    device = launch.start(args.dtype)
    sampling_rng = torch.Generator(device)
    train_tasks = envs.list_tasks(args.env, args.task, "train", args.alfworld_data)
    eval_tasks = envs.list_tasks(args.env, args.task, args.eval_split, args.alfworld_data)[: args.eval_episodes]
    print(envs.describe(train_tasks, "train"), envs.describe(eval_tasks, args.eval_split), sep="\n", flush=True)
    if (fewest := min(len(eval_tasks), args.num_groups * args.group_size)) < launch.WORLD_SIZE:
        raise envs.UserError(f"{launch.WORLD_SIZE} processes are too many to share {fewest} episodes")
    model, chat = launch.load_model(args.model)
    reference = launch.shard(copy.deepcopy(model).requires_grad_(False), device, args) if args.kl_coef else None
    trained = {}  # name: (module, its optimizer)
    # >>> ESTIMATOR: critic
    # RLOO has no critic.
    # <<< ESTIMATOR
    model = launch.shard(model, device, args, plays=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    trained["model"] = model, optimizer

    # 2. The run's folder, with --resume as its newest checkpoint left it, and the environments.
    run = launch.Run(args)
    progress = run.restore(trained) or {"iteration": 0, "global_step": 0, "seconds": 0.0, "evaluations": []}
    global_step, evaluations = progress["global_step"], progress["evaluations"]  # global_step: turns in training
    settings = ("env", "max_turns", "dense_reward", "show_admissible")
    vec = envs.VecEnv(args.num_workers, **{name: getattr(args, name) for name in settings})
    task_sampler = envs.TaskSampler(train_tasks, args.seed)
    task_sampler.take(args.num_groups * progress["iteration"])
    tasks = launch.share(task_sampler.take(args.num_groups, copies=args.group_size))
    eval_tasks = launch.share(eval_tasks)
    eval_at = {0, args.num_iterations, *range(0, args.num_iterations, args.eval_freq or args.num_iterations)}
    start_time = time.time() - progress["seconds"]
    bar = tqdm(total=args.num_iterations, unit="iteration", disable=launch.RANK > 0 or None, dynamic_ncols=True)
    bar.update(progress["iteration"])

    for iteration in range(progress["iteration"], args.num_iterations + 1):
        # 3. Evaluate: before the first update, every `eval_freq` iterations, and after the last update.
        if iteration in eval_at:
            scores, episodes = evaluate(model, chat, vec, eval_tasks, args)
            evaluations.append(f"{scores['success_rate']:.0%} [{scores['low']:.0%}, {scores['high']:.0%}]")
            run.log({f"eval/{name}": value for name, value in scores.items()}, global_step)
            run.log_episodes(episodes, iteration=iteration, split=args.eval_split, group_size=1)
            tqdm.write(f"iteration {iteration}: {args.eval_split} success {evaluations[-1]} on {len(episodes)} games")
            bar.unpause()  # the time left is that of the training
        if iteration == args.num_iterations:
            break

        # 4. Play: the episodes of a group share a task. The next games load while the model updates.
        # Random numbers follow from seed, iteration and process, so that a resumed run draws those it would have drawn.
        iteration_start = time.time()
        torch.manual_seed(args.seed + 1_000_000 * iteration)  # the order of the rows, the same in all processes
        sampling_rng.manual_seed(args.seed + 1_000_000 * iteration + 1000 * launch.RANK)
        batch, episodes = rollout(model, chat, vec, tasks, args, args.temperature, sampling_rng)
        tasks = launch.share(task_sampler.take(args.num_groups, copies=args.group_size))
        vec.prefetch(eval_tasks if iteration + 1 in eval_at else tasks)
        rollout_time = time.time() - iteration_start
        global_step += int(batch["num_turns"].sum())
        valid, response_mask = batch["valid"], batch["response_mask"]
        rows = valid.nonzero().squeeze(1)
        if len(rows) < (1 - args.max_infra_frac) * len(episodes):
            lost = (
                f"{len(episodes) - len(rows)} of {len(episodes)} episodes were lost, each to an infra_error named above"
            )
            raise envs.UserError(f"{lost}; --max-infra-frac {args.max_infra_frac:g} allows no more")

        # 5. Score: log-probabilities under the current and the reference policy, by the path that the update takes.
        scored = defaultdict(partial(torch.zeros_like, batch["logprobs"]))  # (B, T) each
        with torch.no_grad():
            for piece in launch.together(microbatches(batch, launch.share(rows), args), batch):
                inputs = piece["input_ids"], piece["response_mask"], args
                at = piece["rows"], slice(piece["input_ids"].shape[1])
                scored["logprobs"][at], scored["entropy"][at] = token_logprobs(model, *inputs)
                if reference:
                    scored["ref_logprobs"][at], _ = token_logprobs(reference, *inputs)
                # >>> ESTIMATOR: values
                # RLOO has no values.
                # <<< ESTIMATOR
        batch["sampler_logprobs"] = batch["logprobs"]
        batch |= {name: launch.add_up(x) for name, x in scored.items()}  # 0 in the rows that other processes scored
        batch.setdefault("ref_logprobs", batch["logprobs"])
        batch |= compute_advantages(batch, args)

        # 6. Update.
        learning_rate = args.learning_rate * (1 - iteration / args.num_iterations if args.anneal_lr else 1)
        optimizer.param_groups[0]["lr"] = learning_rate
        sums, grad_norms, num_minibatches = defaultdict(float), [], min(args.num_minibatches, len(rows))
        # >>> ESTIMATOR: critic
        # RLOO has no critic.
        # <<< ESTIMATOR
        for _ in range(args.update_epochs):
            for step_rows in rows[torch.randperm(len(rows)).to(device)].tensor_split(num_minibatches):
                num_tokens = int(response_mask[step_rows].sum())
                counts = {"num_episodes": len(step_rows), "num_tokens": num_tokens, "iteration": iteration}
                optimizer.zero_grad()
                for piece in launch.together(microbatches(batch, launch.share(step_rows), args), batch):
                    piece["new_logprobs"], _ = token_logprobs(model, piece["input_ids"], piece["response_mask"], args)
                    loss, piece_sums = compute_loss(piece | counts, args)
                    loss.backward()
                    for name, value in piece_sums.items():
                        sums[name] += float(value)
                max_norm = args.max_grad_norm or float("inf")
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                run.check_finite(grad_norm, batch | {"policy_loss": sums["policy_loss"]})
                optimizer.step()
                grad_norms.append(float(grad_norm))
        everyones = launch.gather([sums])
        sums = {name: sum(some[name] for some in everyones) for name in sums}

        # 7. Log. Means are over the batch's action tokens or its valid episodes; what is not defined is not logged.
        num_tokens, num_valid = int(response_mask.sum()), len(rows)
        episode_returns, token_advantages = batch["rewards"].sum(1), batch["advantages"][response_mask]
        R, played = (x.view(-1, args.group_size) for x in (episode_returns, valid))  # (B/G, G)
        spread = R.masked_fill(~played, -torch.inf).amax(1) - R.masked_fill(~played, torch.inf).amin(1)  # (B/G,)
        seconds = time.time() - iteration_start
        metrics = {
            "charts/episodic_return": episode_returns[valid].mean(),
            "charts/success_rate": batch["won"][valid].float().mean(),
            "charts/episodic_length": batch["num_turns"][valid].float().mean(),
            "charts/response_tokens": num_tokens / num_valid,
            "charts/truncated_frac": batch["truncated"][valid].float().mean(),
            "charts/context_limit_frac": batch["context_limit"][valid].float().mean(),
            "charts/infra_errors": len(episodes) - num_valid,
            "charts/learning_rate": learning_rate,
            "charts/SPS": global_step / (time.time() - start_time),
            "charts/rollout_seconds": rollout_time,
            "charts/update_seconds": seconds - rollout_time,
            "losses/policy_loss": sums["policy_loss"] / len(grad_norms),
            "losses/entropy": batch["entropy"][response_mask].mean(),
            "losses/grad_norm": sum(grad_norms) / len(grad_norms),
            "estimator/advantage_mean": token_advantages.mean(),
            "estimator/advantage_std": token_advantages.std(),
            "estimator/zero_advantage_frac": (spread < 1e-6).float().mean(),  # groups of equal returns
            "estimator/sampler_mismatch": (batch["sampler_logprobs"] - batch["logprobs"])[response_mask].abs().mean(),
        }
        if reference:
            metrics["losses/kl"] = (batch["logprobs"] - batch["ref_logprobs"])[response_mask].mean()
        # >>> ESTIMATOR: metrics
        # RLOO has neither ratio nor critic to report on.
        # <<< ESTIMATOR
        run.log(metrics, global_step)
        run.log_episodes(episodes, iteration=iteration + 1, split="train", group_size=args.group_size)
        bar.update()
        summary = f"success {metrics['charts/success_rate']:.0%}, return {metrics['charts/episodic_return']:.2f}, "
        summary += f"{len(episodes) / seconds:.1f} episodes/s"
        bar.set_postfix_str(summary)
        if bar.disable:  # not a terminal
            left = seconds * (args.num_iterations - iteration - 1)
            print(f"iteration {iteration + 1}/{args.num_iterations}: {summary}, {left:.0f} s left", flush=True)

        # 8. Save an ordinary Hugging Face folder, with what --resume needs beside the weights.
        progress = {"iteration": iteration + 1, "global_step": global_step, "evaluations": evaluations}
        progress["seconds"], interrupted = time.time() - start_time, run.interrupted()
        due = args.save_freq and (iteration + 1) % args.save_freq == 0
        if due or interrupted or iteration + 1 == args.num_iterations:
            run.save(f"iteration_{iteration + 1:06d}", trained, chat.tokenizer, progress)
        if interrupted:
            break

    for resource in (bar, vec, run):
        resource.close()
    print(f"\n{args.eval_split} success: {evaluations[0]} -> {evaluations[-1]} "
          f"after {progress['iteration']} iterations, {progress['seconds']:.0f} s\nmodel: {run.checkpoint}\n"
          f"episodes: {run.folder / 'episodes.jsonl'}\ncurves: tensorboard --logdir {run.folder}")  # fmt: skip


if __name__ == "__main__":
    try:
        main(launch.parse(Args))
    except envs.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
