"""What the scripts share besides the environments: the processes that `torchrun` starts, the model, the run's folder.

    python rloo_multiturn.py ...                          one process: the GPU if there is one, else the CPU
    torchrun --nproc-per-node 8 rloo_multiturn.py ...     one process per GPU (or eight on the CPU)

Each process plays its share of the episodes. Then all exchange what they have played, so that every one holds the whole
batch and computes the same advantages, counts and metrics; each passes its share of the rows forward and backward, and
the gradients are added up. So the update is the one that a single process would make of these episodes.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.tensorboard import SummaryWriter

import envs

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun

# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------


def start(dtype: str) -> torch.device:
    """Joins the processes, and returns this one's device. All but the first stop printing."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if WORLD_SIZE > 1:
        dist.init_process_group()
    elif dtype != "float32":  # FSDP keeps float32 weights beside those that compute: of use to one process, too
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # warns of in-place changes of outputs; we make none
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")
    return device


def share(items):
    """This process's part of a list or tensor: consecutive items, as many as the others have, give or take one."""
    return items[len(items) * RANK // WORLD_SIZE : len(items) * (RANK + 1) // WORLD_SIZE]


def gather(items: list) -> list:
    """The lists of all processes, one after another: undoes `share`."""
    if WORLD_SIZE == 1:
        return items
    parts = [None] * WORLD_SIZE
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def add_up(x: torch.Tensor) -> torch.Tensor:
    """The sum over the processes, in place."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
    return x


def shard(model: torch.nn.Module, device: torch.device, args, plays: bool = False) -> torch.nn.Module:
    """Moves a float32 model to the device, and spreads it over the processes by PyTorch's FSDP2, block by block.

    Weights, gradients and optimizer state lie spread, in float32; a forward pass gathers a block's weights, in
    `args.dtype`, and lets them go. Those of a model that `plays` stay until a backward pass, so that the processes may
    sample different numbers of tokens without waiting for each other.
    """
    blocks = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    if args.gradient_checkpointing:
        for block in blocks:
            block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    if dist.is_initialized():
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype), reduce_dtype=torch.float32)
        for module in (*blocks, model):
            fully_shard(module, reshard_after_forward=not plays, mp_policy=policy)
            # Gradients are added up, for `compute_loss` has divided by the counts of the whole batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model.to(device)


def together(pieces, batch: dict) -> list[dict]:
    """The micro-batches of this process, and idle ones behind them until all processes have equally many.

    Every pass gathers weights and adds up gradients, so all must take part in it. An idle micro-batch is one token that
    is no action.
    """
    pieces = list(pieces)
    idle = {name: x[:1, :1] if x.dim() == 2 else x[:1] for name, x in batch.items()}
    idle["rows"] = torch.zeros(1, dtype=torch.long, device=batch["input_ids"].device)
    return pieces + [idle] * (max(gather([len(pieces)])) - len(pieces))


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


def load_model(path: str) -> tuple[torch.nn.Module, envs.Chat]:
    """A causal language model in float32 on the CPU, without dropout, and its chat layout.

    Raises:
        UserError: there is no such model, or it has no chat template, or its attention forgets.
    """
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        raise envs.UserError(f"--model {path}: has no config.json; a run's models are in its subfolders")
    try:
        chat = envs.Chat(transformers.AutoTokenizer.from_pretrained(path))
        config = transformers.AutoConfig.from_pretrained(path)
        forgets = {*(getattr(config, "layer_types", None) or [])} - {"full_attention"}
        if forgets or getattr(config, "sliding_window", None):
            raise envs.UserError(f"--model {path}: layers of sliding or linear attention are not supported")
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    except envs.UserError:
        raise
    except Exception as error:  # damaged weights, JSON, template: each library has exceptions of its own
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise envs.UserError(f"--model {path}: cannot be loaded ({reason})") from error
    if chat.rewrites_history:
        print("The chat template would write earlier turns otherwise; the policy sees them as they were.", flush=True)
    return model.eval(), chat  # eval: dropout would make the first ratio differ from 1


# ---------------------------------------------------------------------------------------------------------------------
# The run's folder
# ---------------------------------------------------------------------------------------------------------------------


class Run:
    """The folder `runs/{env}__{exp_name}__{seed}__{unix time}`, which the first process alone writes to.

    `args.json` has the arguments, the git commit and the versions; `episodes.jsonl` every episode that was played; then
    there are TensorBoard's event files, and checkpoints.
    """

    def __init__(self, args):
        """
        Raises:
            UserError: the folder cannot be made.
        """
        self.folder = Path("runs") / f"{args.env}__{args.exp_name}__{args.seed}__{int(time.time())}"
        if RANK > 0:
            return
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise envs.UserError(f"cannot make the run's folder {self.folder}: {error.strerror}") from error
        try:
            command, here = ["git", "rev-parse", "HEAD"], Path(__file__).parent
            commit = subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip() or None
        except OSError:  # git is not installed
            commit = None
        versions = {name: version(name) for name in ("torch", "transformers", "textworld", "alfworld", "numpy")}
        about = {"args": asdict(args), "commit": commit, "versions": versions}
        about["processes"] = WORLD_SIZE
        (self.folder / "args.json").write_text(json.dumps(about, indent=2))
        self.writer = SummaryWriter(str(self.folder))
        self.episodes = (self.folder / "episodes.jsonl").open("a")

    def log(self, metrics: dict, step: int) -> None:
        """Writes one value per name for TensorBoard."""
        for name, value in metrics.items() if RANK == 0 else ():
            self.writer.add_scalar(name, float(value), step)

    def log_episodes(self, episodes: list[dict], iteration: int, split: str, group_size: int) -> None:
        """Appends one line per episode to `episodes.jsonl`."""
        if RANK == 0:
            for i, episode in enumerate(episodes):
                about = {"iteration": iteration, "split": split, "group": i // group_size}
                self.episodes.write(json.dumps(about | episode) + "\n")
            self.episodes.flush()

    def save(self, model, tokenizer, name: str) -> Path:
        """An ordinary Hugging Face folder, written aside and renamed, so that a crash leaves no half of one."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)  # whole on the first process alone
        folder = self.folder / name
        if RANK == 0:
            first = {}  # the first name of a weight that has several (tied embeddings): saved once
            for key, parameter in model.named_parameters(remove_duplicate=False):
                state[key] = state[first.setdefault(parameter, key)]
            model.save_pretrained(folder.with_suffix(".part"), state_dict=state)
            tokenizer.save_pretrained(folder.with_suffix(".part"))
            folder.with_suffix(".part").rename(folder)
        return folder

    def close(self) -> None:
        if RANK == 0:
            self.writer.close()
            self.episodes.close()
        if dist.is_initialized():
            dist.destroy_process_group()
