"""What the scripts share besides the environments: the processes that `torchrun` starts, the model, the run's folder.

    python rloo_multiturn.py ...                          one process: the GPU if there is one, else the CPU
    torchrun --nproc-per-node 8 rloo_multiturn.py ...     one process per GPU (or eight on the CPU)

Each process plays its share of the episodes. Then all exchange what they have played, so that every one holds the whole
batch and computes the same advantages, counts and metrics; each passes its share of the rows forward and backward, and
the gradients are added up. So the update is the one that a single process would make of these episodes.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
import tyro
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.tensorboard import SummaryWriter

import envs

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)  # not one process's part of the weights
os.environ["TRANSFORMERS_SDPA_FORCE_GQA"] = str(int(not torch.cuda.is_available()))  # CPU: no copy of keys per head
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
        chat = envs.Chat(transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False))
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        if len(chat.tokenizer) > (known := config.get_text_config().vocab_size):
            raise envs.UserError(f"--model {path}: its tokenizer knows {len(chat.tokenizer)} tokens, the model {known}")
        forgets = {*(getattr(config, "layer_types", None) or [])} - {"full_attention"}
        if forgets or getattr(config, "sliding_window", None):
            raise envs.UserError(f"--model {path}: layers of sliding or linear attention are not supported")
        how = {"dtype": torch.float32, "attn_implementation": "sdpa", "use_safetensors": True}  # never a pickle
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **how)
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

# What may differ from the run that is resumed: it changes how long, how often and where, not what an iteration does.
MAY_CHANGE = {"resume", "num_iterations", "save_freq", "eval_freq", "eval_episodes", "eval_temperature", "num_workers"}


def parse(Args):
    """The arguments on the command line; with --resume, those of the resumed run where the command line has none.

    Raises:
        UserError: there is nothing to resume, or other arguments are given than the run had.
    """
    args = tyro.cli(Args)
    if args.resume:
        folder = Path(args.resume)
        if not newest_checkpoint(folder):
            raise envs.UserError(f"--resume {folder}: holds no checkpoint that can be resumed")
        saved = json.loads((folder / "args.json").read_text())["args"]
        if unknown := saved.keys() ^ asdict(args).keys():
            raise envs.UserError(f"--resume {folder}: made by another script ({', '.join(sorted(unknown))} differ)")
        args = tyro.cli(Args, default=Args(**saved | {"resume": args.resume}))
        now = asdict(args)
        changed = [f"{x} was {saved[x]}, not {now[x]}" for x in saved.keys() - MAY_CHANGE if saved[x] != now[x]]
        if changed:
            raise envs.UserError(f"--resume {folder}: {'; '.join(sorted(changed))}; a new run can start from its model")
    return args


def newest_checkpoint(folder: Path) -> Path | None:
    found = [path.parent for path in folder.glob("*/training_state.pt") if path.parent.suffix != ".part"]
    return max(found, default=None)  # iteration_000010 < iteration_000020 < sft


def sync(path: Path) -> None:
    """Forces a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


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
        self.folder = Path(args.resume or f"runs/{args.env}__{args.exp_name}__{args.seed}__{int(time.time())}")
        self.checkpoint = newest_checkpoint(self.folder) if args.resume else None
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if RANK > 0:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=bool(args.resume))
        except OSError as error:
            raise envs.UserError(f"cannot make the run's folder {self.folder}: {error.strerror}") from error
        try:
            command, here = ["git", "rev-parse", "HEAD"], Path(__file__).parent
            commit = subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip() or None
        except OSError:  # git is not installed
            commit = None
        versions = {name: version(name) for name in ("torch", "transformers", "textworld", "alfworld", "numpy")}
        about = {"args": asdict(args), "commit": commit, "versions": versions, "processes": WORLD_SIZE}
        if args.resume:  # what the run was until now is kept
            about["before"] = json.loads((self.folder / "args.json").read_text())
            about["before"]["until"] = self.checkpoint.name
        (self.folder / "args.part").write_text(json.dumps(about, indent=2))
        (self.folder / "args.part").rename(self.folder / "args.json")
        self.episodes = (self.folder / "episodes.jsonl").open("a")
        self.writer = None if args.resume else SummaryWriter(str(self.folder))  # with --resume, `restore` opens it

    def log(self, metrics: dict, step: int) -> None:
        """Writes one value per name for TensorBoard."""
        with self._writing("the curves"):
            for name, value in metrics.items() if RANK == 0 else ():
                self.writer.add_scalar(name, float(value), step)

    def log_episodes(self, episodes: list[dict], iteration: int, split: str, group_size: int) -> None:
        """Appends one line per episode to `episodes.jsonl`."""
        lines = []
        for i, episode in enumerate(episodes):
            about = {"iteration": iteration, "split": split, "group": i // group_size}
            lines.append(json.dumps(about | episode) + "\n")
        if RANK == 0:
            with self._writing("episodes.jsonl"):
                self.episodes.writelines(lines)
                self.episodes.flush()

    def save(self, name: str, trained: dict, tokenizer, progress: dict) -> None:
        """A checkpoint: an ordinary Hugging Face folder, and `training_state.pt` in it for `restore`.

        It is written aside, forced to the disk and renamed, so that a crash leaves the last one whole. An older one
        keeps its model and loses its training state, which is several times as large.

        Args:
            trained: for each name a module and its optimizer; "model" is the one that plays.
            progress: numbers, strings and lists, as `restore` shall return them.
        """
        folder, part, last = self.folder / name, self.folder / f"{name}.part", self.checkpoint
        if folder == last:
            return  # resumed after its end
        state = {name: get_state_dict(*pair, options=WHOLE) for name, pair in trained.items()}
        if RANK > 0:
            self.checkpoint = folder
            return
        (model, _), (weights, optimizer_state) = trained["model"], state["model"]
        first = {}  # the first name of a weight that has several (tied embeddings): saved once
        for key, parameter in model.named_parameters(remove_duplicate=False):
            weights[key] = weights[first.setdefault(parameter, key)]
        state["model"] = {}, optimizer_state  # its weights are in the folder
        with self._writing(folder):
            shutil.rmtree(part, ignore_errors=True)
            model.save_pretrained(part, state_dict=weights)
            tokenizer.save_pretrained(part)
            progress = progress | {"episodes_bytes": self.episodes.tell()}
            torch.save({"modules": state, "progress": progress}, part / "training_state.pt")
            for path in (*part.iterdir(), part):
                sync(path)
            part.rename(folder)
            sync(self.folder)
        self.checkpoint = folder
        if last:
            (last / "training_state.pt").unlink(missing_ok=True)

    def check_finite(self, grad_norm, tensors: dict) -> None:
        """Ends the run before a step along a gradient that is not finite, and keeps what it came from.

        Raises:
            UserError: names those of the tensors (or numbers) that are not finite, and where all of them are kept.
        """
        if math.isfinite(float(grad_norm)):
            return
        broken = [name for name, x in tensors.items() if not torch.as_tensor(x).isfinite().all()]
        if RANK == 0:
            with self._writing("not_finite.pt"):
                torch.save(tensors, self.folder / "not_finite.pt")
        where = f"not finite: the gradient{''.join(f', {name}' for name in broken)}"
        raise envs.UserError(f"{where}; the batch is kept in {self.folder / 'not_finite.pt'}")

    @contextmanager
    def _writing(self, what):
        """Says in one line what could not be written, and what is whole."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            whole = f"the last whole checkpoint is {self.checkpoint or 'the model it began with'}"
            reason = " ".join(str(error).split())[:200]
            raise envs.UserError(f"{self.folder}: cannot write {what} ({reason}); {whole}") from error

    def restore(self, trained: dict) -> dict | None:
        """With --resume, brings modules and optimizers to where the newest checkpoint has them, and gives its progress.

        What was logged after it is undone: `episodes.jsonl` loses those lines to `episodes_undone.jsonl`, TensorBoard
        hides those points.
        """
        if not self.checkpoint:
            return None
        saved = torch.load(self.checkpoint / "training_state.pt", weights_only=True)
        weights = load_model(str(self.checkpoint))[0].state_dict()
        for name, (module, optimizer) in trained.items():
            module_state, optimizer_state = saved["modules"][name]
            states = {"model_state_dict": module_state or weights, "optim_state_dict": optimizer_state}
            set_state_dict(module, optimizer, **states, options=WHOLE)
        progress = saved["progress"]
        if RANK == 0:
            with (self.folder / "episodes.jsonl").open("r+") as file:
                file.seek(progress["episodes_bytes"])
                if undone := file.read():
                    with (self.folder / "episodes_undone.jsonl").open("a") as aside:
                        aside.write(undone)
                file.truncate(progress["episodes_bytes"])
            self.writer = SummaryWriter(str(self.folder), purge_step=progress["global_step"] + 1)
        return progress

    def _on_signal(self, number, frame) -> None:
        """The first SIGINT or SIGTERM is remembered until the iteration ends; a second one ends the process."""
        self.signal = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        print("\ninterrupted: this iteration is finished and saved; once more to end at once", file=sys.stderr)

    def interrupted(self) -> bool:
        """Whether any process was asked to stop."""
        return any(gather([self.signal]))

    def close(self) -> None:
        if self.signal:
            print(f"interrupted after {self.checkpoint.name}; to go on: --resume {self.folder}", file=sys.stderr)
        if RANK == 0:
            self.writer.close()
            self.episodes.close()
        if dist.is_initialized():
            dist.destroy_process_group()
