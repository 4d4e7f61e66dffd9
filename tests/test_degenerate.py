"""Batches that hardly teach anything: each has a defined outcome, and every metric stays finite, in all three files.

| batch                                   | RLOO, GRPO                       | PPO                             |
| --------------------------------------- | -------------------------------- | ------------------------------- |
| all returns equal                       | the policy stays as it is        | learns against its critic       |
| one whole episode left in each group    | the policy stays as it is        | learns: it compares no episodes |
| a micro-batch without action tokens     | adds 0 to loss and gradient      | the same                        |
| actions of one token                    | ordinary                         | ordinary                        |
| conversations that outgrow the context  | a counted failure                | the same                        |
"""

import math
from dataclasses import fields

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

import grpo_multiturn as grpo
import launch
import ppo_multiturn as ppo
import rloo_multiturn as rloo

SIBLINGS = [rloo, grpo, ppo]
COMPARES_EPISODES = {rloo: True, grpo: True, ppo: False}


def equal_returns(batch):
    batch["rewards"][:] = 0
    batch["rewards"][:, 0] = 1


def one_left_in_each_group(batch):
    batch["rewards"][:] = 0
    batch["rewards"][[0, 3], 0] = 1
    for row in (1, 2, 4, 5):
        batch["valid"][row], batch["response_mask"][row] = False, False


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs one iteration of `main` on a batch of 2 x 3 episodes that `change` alters; metrics, and old and new weights.

    The KL penalty is off, for it teaches from any batch.
    """

    def start(module, change=lambda batch: None, **arguments):
        rollout, batches = module.rollout, []

        def altered(*args):
            batch, episodes = rollout(*args)
            if len(episodes) == 6:  # not the evaluation
                change(batch)
                batches.append(batch)
            return batch, episodes

        monkeypatch.setattr(module, "rollout", altered)
        monkeypatch.chdir(tmp_path)
        small = {"num_iterations": 1, "num_groups": 2, "group_size": 3, "max_turns": 3, "eval_episodes": 1}
        small |= {"env": "alfworld", "alfworld_data": "generated", "num_workers": 1, "kl_coef": 0.0}
        small |= {"critic_warmup": 0} if "critic_warmup" in {field.name for field in fields(module.Args)} else {}
        module.main(module.Args(**small | {"max_infra_frac": 1.0} | arguments))
        (folder,) = (tmp_path / "runs").iterdir()
        log = EventAccumulator(str(folder)).Reload()
        metrics = {tag: [event.value for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}
        assert all(math.isfinite(value) for values in metrics.values() for value in values), metrics
        before, after = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
            for path in (module.Args().model, folder / "iteration_000001")
        )
        moved = max(float((before[name] - after[name]).abs().max()) for name in before)
        return {tag: values[-1] for tag, values in metrics.items()}, moved, batches[0]

    return start


@pytest.mark.parametrize("module", SIBLINGS)
def test_equal_returns_leave_the_policy_as_it_is_unless_a_critic_judges(run, module):
    metrics, moved, _ = run(module, equal_returns)
    assert metrics["estimator/zero_advantage_frac"] == 1 and metrics["charts/episodic_return"] == 1
    if COMPARES_EPISODES[module]:
        assert moved == 0 and metrics["losses/grad_norm"] == metrics["losses/policy_loss"] == 0
    else:
        assert moved > 0  # PPO's whitened advantages differ from token to token


@pytest.mark.parametrize("module", SIBLINGS)
def test_group_with_one_whole_episode_is_left_out_where_episodes_are_compared(run, module):
    metrics, moved, _ = run(module, one_left_in_each_group)
    assert metrics["charts/infra_errors"] == 4 and metrics["charts/episodic_return"] == 1
    assert (moved == 0) == COMPARES_EPISODES[module]


@pytest.mark.parametrize("module", SIBLINGS)
def test_micro_batch_without_action_tokens_adds_nothing(run, module):
    """A whole episode has at least one action token a turn; a process that has fewer micro-batches has an idle one."""
    batch = run(module)[2]
    assert (batch["response_mask"].sum(1) >= batch["num_turns"]).all()
    args, (model, _) = module.Args(), launch.load_model(module.Args().model)
    piece = {name: x[:1] for name, x in batch.items()}
    piece["response_mask"] = torch.zeros_like(piece["response_mask"])
    piece["new_logprobs"], _ = module.token_logprobs(model, piece["input_ids"], piece["response_mask"], args)
    loss, sums = module.compute_loss(piece | {"num_episodes": 6, "num_tokens": 50, "iteration": 9}, args)
    loss.backward()
    assert loss == 0 and all(value == 0 for value in sums.values())
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("module", SIBLINGS)
def test_actions_of_one_token_are_ordinary(run, module):
    metrics, _, batch = run(module, max_action_tokens=1)
    assert metrics["charts/response_tokens"] == metrics["charts/episodic_length"] == 3
    assert batch["response_mask"].sum() == batch["num_turns"].sum()


@pytest.mark.parametrize("module", SIBLINGS)
def test_conversation_that_outgrows_the_context_has_failed_and_is_counted(run, monkeypatch, module):
    load_model = launch.load_model

    def short(path):
        model, chat = load_model(path)
        model.config.max_position_embeddings = 300
        return model, chat

    monkeypatch.setattr(launch, "load_model", short)
    metrics, moved, batch = run(module, max_turns=12)
    assert 0 < metrics["charts/context_limit_frac"] <= metrics["charts/truncated_frac"]
    assert batch["input_ids"].shape[1] <= 300
    over = batch["context_limit"]
    assert over.any() and not batch["won"][over].any() and (batch["num_turns"][over] < 12).all()
