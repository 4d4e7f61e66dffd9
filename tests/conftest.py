"""Fixtures that several test files share. No test needs the network, a GPU, or a model other than the embedded one."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import envs

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tokenizer():
    """The embedded policy's tokenizer."""
    return AutoTokenizer.from_pretrained(ROOT / "checkpoints" / "tiny")


@pytest.fixture(scope="session")
def chat(tokenizer):
    return envs.Chat(tokenizer)


@pytest.fixture
def random_model(chat):
    """A transformer with random weights: it samples all sorts of tokens, and at times the one that ends an action."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(chat.tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.3,  # peaked enough for log-probabilities to differ
    )
    model = LlamaForCausalLM(config).eval()
    model.get_output_embeddings().weight.data[chat.eot_id] *= 6  # after some contexts by far the most likely token
    return model


class ScriptedVec:
    """Stands in for `VecEnv` where a test is about tokens: `turns[i]` is what episode i observes, one text a turn.

    An episode ends (won) after its last text; `faults` names (episode, turn) with an infrastructure error.
    """

    def __init__(self, turns: list[list[str]], faults=()):
        self.turns, self.faults, self.seen = turns, set(faults), []

    def reset(self, tasks):
        self.at = [0] * len(self.turns)
        return [(texts[0], {"won": False, "progress": 0.0}) for texts in self.turns]

    def step(self, actions):
        self.seen.append(dict(actions))
        answers = {}
        for i in actions:
            self.at[i] += 1
            over = self.at[i] == len(self.turns[i])
            info = {"won": over, "progress": float(over)}
            if (i, self.at[i]) in self.faults:
                answers[i] = ("", 0.0, False, True, info | {"infra_error": "the worker died"})
            else:
                obs = "over" if over else self.turns[i][self.at[i]]
                answers[i] = (obs, float(over), over, False, info)
        return answers


@pytest.fixture
def scripted_vec():
    return ScriptedVec
