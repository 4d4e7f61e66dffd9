"""Will it fit? Memory per GPU by model and number of GPUs, computed, not measured.

    python benchmark/memory.py                                       the README's table
    python benchmark/memory.py --episodes 512 --context 8192         another batch

Weights, gradients, AdamW's two averages and the reference lie spread over the GPUs in float32 (4 bytes each); while it
plays and learns, a GPU also holds the whole policy in bfloat16. Beside these stands the larger of two: the attention
cache of its episodes at the end of a rollout, or what one micro-batch keeps for the backward pass. The latter is
counted tensor by tensor in a forward pass on tensors without storage (PyTorch's fake tensors): two models, of one and
of two blocks, give the bytes of a block and of the rest. Fragmentation and libraries' buffers are left out: leave 10 %
free.
"""

import argparse
import os

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2Config

os.environ["TRANSFORMERS_SDPA_FORCE_GQA"] = "0"  # as on a GPU, also where this machine has none
GIB = 2**30
# From the models' own config.json: hidden size, size of the MLP, blocks, heads, key-value heads, tied embeddings.
MODELS = {
    "Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, True),
    "Qwen2.5-3B-Instruct": (2048, 11008, 36, 16, 2, True),
    "Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, False),
}
VOCABULARY = {"Qwen2.5-7B-Instruct": 152064}  # 151936 in the others


def make_config(name: str, blocks: int | None = None) -> Qwen2Config:
    hidden, mlp, all_blocks, heads, kv_heads, tied = MODELS[name]
    return Qwen2Config(
        vocab_size=VOCABULARY.get(name, 151936),
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=blocks or all_blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )


def kept_for_backward(config: Qwen2Config, tokens: int, row: int) -> int:
    """Bytes that a forward pass of `tokens` in rows of `row` keeps, the model's own weights and the head left out."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        weights, kept = {p.untyped_storage()._cdata for p in model.parameters()}, {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage._cdata not in weights:
                kept[storage._cdata] = storage.nbytes()
            return x

        ids = torch.zeros(tokens // row, row, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            output = model.model(ids, position_ids=torch.arange(row)[None], use_cache=False)  # alive while we count
        total = sum(kept.values())
        del output
    return total


def table(options) -> str:
    lines = [
        f"{options.episodes} episodes of up to {options.context} tokens, {options.tokens_per_microbatch} tokens per "
        "micro-batch; GiB per GPU, without and with `--gradient-checkpointing`.",
        "",
        "| model | parameters | GPUs | RLOO, GRPO | PPO |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in MODELS:
        config = make_config(name)
        with torch.device("meta"):
            P = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        tokens = max(options.tokens_per_microbatch // options.context, 1) * options.context
        one, two = (kept_for_backward(make_config(name, n), tokens, options.context) for n in (1, 2))
        block, rest = two - one, 2 * one - two
        # The head runs on action tokens alone: bfloat16 logits, then log-probabilities and their gradient in float32.
        head = int(tokens * options.action_share) * config.vocab_size * (2 + 4 + 4)
        inputs = tokens * config.hidden_size * 2
        L = config.num_hidden_layers
        activations = {False: L * block + rest + head, True: L * inputs + max(block + rest, head)}
        head_size = config.hidden_size // config.num_attention_heads
        for gpus in options.gpus:
            cache = 2 * L * config.num_key_value_heads * head_size * 2  # keys and values of one token
            cache *= 1.25 * options.context * options.episodes / gpus  # buffers grow by half: a quarter more on average
            cells = []
            for spread in (16 + 4, 16 + 4 + 16):  # bytes per parameter: policy and reference; a critic too
                sizes = [spread * P / gpus + 2 * P + max(cache, activations[x]) for x in (False, True)]
                cells.append(" / ".join(f"{size / GIB:.0f}" for size in sizes))
            lines.append(f"| {name} | {P / 1e9:.2f} B | {gpus} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--episodes", type=int, default=256, help="episodes in a batch, over all GPUs")
    parser.add_argument("--context", type=int, default=4096, help="tokens in the longest episode")
    parser.add_argument("--tokens-per-microbatch", type=int, default=8192)
    parser.add_argument("--action-share", type=float, default=0.1, help="share of the tokens that the policy sampled")
    print(table(parser.parse_args()))


if __name__ == "__main__":
    main()
