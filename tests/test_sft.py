"""Cloning: the same token layout as RL, every turn's action tokens, and nothing else."""

from types import SimpleNamespace

import torch

import envs
import rloo_multiturn as rloo
import sft
from tasks import Task

DEMO = {"obs": ["Kitchen.", "The fridge 1 is closed.", "Cold."], "actions": ["go to fridge 1", "open fridge 1", "look"]}


class ReplayModel(torch.nn.Module):
    """A "policy" that says given tokens, so that a rollout reproduces a demonstration."""

    def __init__(self, actions, vocab_size):
        super().__init__()
        self.tokens, self.vocab_size = [t for action in actions for t in action], vocab_size
        self.device, self.config = torch.device("cpu"), SimpleNamespace(max_position_embeddings=1000)

    def forward(self, block, **_):
        logits = torch.full((len(block), 1, self.vocab_size), -1e4)
        logits[:, :, self.tokens.pop(0)] = 1e4
        return SimpleNamespace(logits=logits)


def test_layout_is_the_rollouts_token_for_token(chat, scripted_vec):
    (ids, mask), *_ = sft.tokenize([DEMO], chat)
    model = ReplayModel([chat.action(action) for action in DEMO["actions"]], len(chat.tokenizer))
    args = SimpleNamespace(max_turns=3, max_action_tokens=20, dtype="float32")
    batch, episodes = rloo.rollout(
        model, chat, scripted_vec([DEMO["obs"]]), [Task("textworld", "demo")], args, 1.0, torch.Generator()
    )
    assert episodes[0]["actions"] == DEMO["actions"]
    assert batch["input_ids"][0].tolist() == ids and batch["response_mask"][0].tolist() == mask


def test_every_turn_is_trained_on_and_only_its_action_tokens(chat):
    (ids, mask), *_ = sft.tokenize([DEMO], chat)
    trained = [t for t, m in zip(ids, mask, strict=True) if m]
    assert trained == [t for action in DEMO["actions"] for t in chat.action(action)]
    assert trained.count(chat.eot_id) == 3


def test_expert_episodes_win_and_replay_to_the_same_observations():
    tasks = envs.list_tasks("alfworld", "all", "demos", "generated")[:6]
    vec = envs.VecEnv(2, env="alfworld", max_turns=50, expert=True)
    demos = sft.play_demonstrations(vec, tasks, num_demos=4, side_by_side=3)
    assert len(demos) == 4
    vec.reset(tasks[:1])
    for turn, action in enumerate(demos[0]["actions"]):
        assert len(demos[0]["obs"]) == len(demos[0]["actions"])
        obs, _, terminated, _, info = vec.step({0: action})[0]
        assert terminated == (turn + 1 == len(demos[0]["actions"]))
        if not terminated:
            assert obs == demos[0]["obs"][turn + 1]
    assert info["won"]
    # A turn limit that nobody can keep leaves nothing.
    short = envs.VecEnv(1, env="alfworld", max_turns=1, expert=True)
    tried, reset = [], short.reset
    short.reset = lambda some: tried.extend(some) or reset(some)
    assert sft.play_demonstrations(short, tasks * 5, num_demos=2, side_by_side=2) == [] and len(tried) == 8
    vec.close()
    short.close()


def test_training_ends_in_the_step_that_says_so_whatever_the_epochs(random_model, chat):
    rows = sft.tokenize([DEMO] * 6, chat)
    args = SimpleNamespace(seed=1, learning_rate=1e-3, batch_size=2, num_epochs=3, max_grad_norm=1.0)
    args.tokens_per_microbatch, args.temperature, args.dtype = 1000, 1.0, "float32"
    seen = []
    sft.train(
        random_model, sft.make_optimizer(random_model), rows, args, lambda step, metrics: seen.append(step) or step == 2
    )
    assert seen == [1, 2]
    seen.clear()
    sft.train(random_model, sft.make_optimizer(random_model), rows, args, lambda step, metrics: seen.append(step))
    assert seen == list(range(1, 10))
