"""What the scripts share: the environment protocol, the worker pool, and the chat layout.

    TextEnv   one game at a time, Gymnasium's signature, text in and text out
    VecEnv    many TextEnvs in worker processes, stepped in a batch
    Chat      observations -> tokens, sampled tokens -> action, exactly as the model's chat template lays them out

The engines (which games there are, how to play them) live in `tasks/`. To add an environment, write a module with
`list_tasks`, `describe` and `Engine` (see `tasks/__init__.py`), and name it in `ENVIRONMENTS` and in the scripts'
`--env`.
"""

import importlib
import os
import random
import subprocess
import sys
from collections import deque
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from tasks import Task, UserError

# Per environment: the module that plays it, and the defaults of `--task`, `--eval-split` and `--max-turns`.
ENVIRONMENTS = {
    "textworld": {"module": "tasks.textworld", "task": "w2-o3-q4", "eval_split": "test", "max_turns": 12},
    "alfworld": {"module": "tasks.alfworld", "task": "all", "eval_split": "valid_unseen", "max_turns": 24},
}
MAX_ACTION_CHARS = 200  # longest command that an engine gets to see, in characters


def list_tasks(env: str, names: str, split: str, alfworld_data: str = "auto") -> list[Task]:
    """All tasks of a split, in an order that is the same on every machine; a comma in `names` mixes equally.

    Raises:
        UserError: the environment, a name or the split is unknown, or the data set is not where it should be.
    """
    if env not in ENVIRONMENTS:
        raise UserError(f"--env {env}: unknown environment, choose from {', '.join(ENVIRONMENTS)}")
    module = importlib.import_module(ENVIRONMENTS[env]["module"])
    names = names or ENVIRONMENTS[env]["task"]
    options = {"data": alfworld_data} if env == "alfworld" else {}
    return module.list_tasks(names, split, **options)


def describe(tasks: list[Task], split: str) -> str:
    """One line for the user: which games these are, how many of each kind, and how to get better ones."""
    return importlib.import_module(ENVIRONMENTS[tasks[0].env]["module"]).describe(tasks, split)


def check(args, names: str, at_least: float = float("-inf"), above: float = float("-inf")) -> None:
    """Refuses arguments that are out of range, and NaN.

    Raises:
        UserError: names the option, its value and the rule.
    """
    for name in names.split():
        value = getattr(args, name)
        if not (value >= at_least and value > above):
            rule = f"at least {at_least}" if above == float("-inf") else f"above {above}"
            raise UserError(f"--{name.replace('_', '-')} {value}: must be {rule}")


class TaskSampler:
    """Endless tasks in a random order: every task once before any comes twice. The same seed gives the same order."""

    def __init__(self, tasks: list[Task], seed: int):
        self.tasks, self.rng, self.queue = tasks, random.Random(seed), deque()

    def take(self, n: int, copies: int = 1) -> list[Task]:
        """The next n tasks, each `copies` times in a row: the episodes of a group share a task."""
        while len(self.queue) < n:
            self.queue.extend(self.rng.sample(self.tasks, len(self.tasks)))
        return [task for task in [self.queue.popleft() for _ in range(n)] for _ in range(copies)]


# ---------------------------------------------------------------------------------------------------------------------
# One environment
# ---------------------------------------------------------------------------------------------------------------------


def parse_action(text: str) -> str:
    """The command in a model's reply: what follows the last closing think tag, its first non-empty line.

    Only printable ASCII of bounded length may reach an engine: a control character can kill the Z-machine's process,
    and a backslash breaks its interpreter.
    """
    answer = text.rsplit("</think>", 1)[-1]
    line = next((line for line in answer.splitlines() if line.strip()), "")
    printable = "".join(c if " " <= c <= "~" and c != "\\" else " " for c in line)
    return " ".join(printable.split())[:MAX_ACTION_CHARS]


class TextEnv:
    """Gymnasium's protocol over one engine.

    `reset(task) -> (obs, info)` and `step(action) -> (obs, reward, terminated, truncated, info)`; `obs` is the whole
    text of the next user message, `action` the model's reply. `info` has `won` (bool, the engine's own word),
    `progress` (in [0, 1], 1 exactly when won), `max_score`, `task_id` and `task_type`.

    Reward: sparse, 1 on the turn that wins and else 0; dense, the turn's change of `progress`, so that an episode's
    rewards sum to 1 exactly when it is won and to less otherwise. `terminated`: the game is won or lost; `truncated`:
    the turn limit is reached. The limit is part of the task ("within the budget"), so a truncated episode has failed
    and is worth 0 from there on.
    """

    def __init__(
        self, env: str, max_turns: int, dense_reward: bool = False, show_admissible: bool = False, expert: bool = False
    ):
        engine = importlib.import_module(ENVIRONMENTS[env]["module"]).Engine
        self.engine = engine(admissible=show_admissible)
        self.max_turns, self.dense_reward, self.expert = max_turns, dense_reward, expert

    def reset(self, task: Task) -> tuple[str, dict]:
        self.task, self.turn = task, 0
        state = self.engine.reset(task)
        # Some games start with a part of the goal fulfilled; progress counts from there.
        self.initial_progress, self.progress, self.max_score = state.progress, 0.0, state.max_score
        return f"Your task is: {state.goal}\n{self._message(state)}", self._info(state)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.turn += 1
        state = self.engine.step(parse_action(action))
        before = self.progress
        if state.won:
            self.progress = 1.0
        else:
            gained = (state.progress - self.initial_progress) / (1 - self.initial_progress)
            self.progress = min(max(gained, 0.0), 1 - 1e-6)
        reward = self.progress - before if self.dense_reward else float(state.won)
        truncated = not state.over and self.turn >= self.max_turns
        return self._message(state), reward, state.over, truncated, self._info(state)

    def _message(self, state) -> str:
        commands = f"\ncommands: {', '.join(state.admissible)}" if state.admissible else ""
        return f"state: {state.obs}{commands}\nyour action:"

    def _info(self, state) -> dict:
        info = {"won": state.won, "progress": self.progress, "max_score": self.max_score}
        info |= {"task_id": self.task.task_id, "task_type": self.task.name}
        if self.expert and not state.over:
            info["expert_action"] = self.engine.expert_action()
        return info


# ---------------------------------------------------------------------------------------------------------------------
# Many environments
# ---------------------------------------------------------------------------------------------------------------------


def serve(connection: Connection) -> None:
    """A worker process: plays the (slot, Task or action) requests it is sent, one after another, and answers each."""
    settings = connection.recv()
    envs = {}
    while True:
        try:
            requests = connection.recv()
        except (EOFError, ConnectionResetError):  # the parent is gone, or has closed the pool
            return
        for slot, item in requests:
            try:
                env = envs.setdefault(slot, None) or TextEnv(**settings)
                envs[slot] = env
                connection.send(env.reset(item) if isinstance(item, Task) else env.step(item))
            except (BrokenPipeError, ConnectionResetError):
                return
            except Exception as error:  # an engine's fault ends this episode, not the worker
                envs.pop(slot, None)
                connection.send(f"{type(error).__name__}: {error}")


class VecEnv:
    """Episodes played side by side in worker processes; `settings` are TextEnv's arguments.

    Engines are deterministic, so results depend neither on the number of workers nor on which is faster. A worker that
    dies, or that takes longer than `timeout` seconds for one call, is replaced, and its other episodes are brought
    back by playing their actions again. The episode that was being played gets `info["infra_error"]`, and the caller
    must leave it out of the loss and of every baseline: it is not a failure of the policy. A batch whose episodes are
    all lost raises UserError.
    """

    def __init__(self, num_workers: int, timeout: float = 60.0, **settings):
        self.settings, self.timeout = settings, timeout
        self.workers = [None] * num_workers  # (process, connection)
        for w in range(num_workers):
            self._start(w)
        self.prefetched = None  # the tasks whose reset is under way

    def prefetch(self, tasks: list[Task]) -> None:
        """Starts loading the games of the next `reset(tasks)`; the finished episodes of the last batch are dropped."""
        if self.prefetched is not None:
            self._collect()
        self.prefetched = list(tasks)
        # Neighbours share a worker: a group plays one game, and an engine's caches then serve all of it.
        self.worker_of = [slot * len(self.workers) // len(tasks) for slot in range(len(tasks))]
        self.played = {slot: [] for slot in range(len(tasks))}  # the task and the actions of each live episode
        self.pending = [deque() for _ in self.workers]  # (slot, answer is wanted), in the order of sending
        self._send({slot: task for slot, task in enumerate(tasks)})

    def reset(self, tasks: list[Task]) -> list[tuple[str, dict]]:
        """One new episode per task: a list of (obs, info)."""
        if self.prefetched != list(tasks):
            self.prefetch(tasks)
        self.prefetched = None
        answers = self._collect()
        return [answers[slot] for slot in range(len(tasks))]

    def step(self, actions: dict[int, str]) -> dict[int, tuple[str, float, bool, bool, dict]]:
        """One turn of the episodes named by the keys, which count from 0 in the order of the last `reset`'s tasks."""
        self._send(actions)
        answers = self._collect()
        return {slot: answers[slot] for slot in actions}

    def close(self) -> None:
        for process, connection in self.workers:
            connection.close()
            process.kill()
            process.wait()

    def _start(self, w: int) -> None:
        parent, child = Pipe()
        # A plain subprocess rather than multiprocessing's spawn, which would import the training script, torch and
        # all, in every worker. Fixed hashing: TextWorld's cooking games depend on the order of sets.
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(child.fileno())],
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is the training script's to handle
        )
        child.close()
        parent.send(self.settings)
        self.workers[w] = (process, parent)

    def _send(self, items: dict[int, Task | str]) -> None:
        for slot, item in items.items():
            self.played[slot].append(item)
        for w in range(len(self.workers)):
            requests = [(slot, item) for slot, item in items.items() if self.worker_of[slot] == w]
            self._post(w, requests, wanted=[True] * len(requests))

    def _post(self, w: int, requests: list, wanted: list[bool]) -> None:
        self.pending[w] = deque((slot, want) for (slot, _), want in zip(requests, wanted, strict=True))
        try:
            # One message for all: a worker that starts to answer before it has read everything could block us both.
            self.workers[w][1].send(requests)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the worker is dead; `_collect` finds out

    def _collect(self) -> dict:
        answers = {}
        for w, queue in enumerate(self.pending):
            while queue:
                slot, wanted = queue[0]
                answer, alive = self._receive(w)
                if isinstance(answer, str) and slot in self.played:  # the fault, in words
                    print(f"infra_error in {self.played[slot][0].task_id}: {answer}", file=sys.stderr, flush=True)
                    info = {"won": False, "progress": 0.0, "infra_error": answer}
                    first = len(self.played.pop(slot)) == 1
                    answer, wanted = ("", info) if first else ("", 0.0, False, True, info), True
                if wanted and not isinstance(answer, str):
                    answers[slot] = answer
                queue.popleft()
                if not alive:
                    self._replace(w, unanswered={s for s, want in queue if want})
                    queue = self.pending[w]
        if self.worker_of and not self.played:
            raise UserError("all episodes of the batch were lost, each to the infra_error printed above")
        return answers

    def _receive(self, w: int) -> tuple[tuple | str, bool]:
        """The next answer of worker w, or the fault in words; and whether the worker lives on."""
        process, connection = self.workers[w]
        try:
            if connection.poll(self.timeout):
                return connection.recv(), True
            return f"no answer within {self.timeout:g} s", False
        except (EOFError, ConnectionResetError):
            return f"the worker died (exit code {process.wait()})", False

    def _replace(self, w: int, unanswered: set[int]) -> None:
        """A new worker in place of w, with the same episodes: their tasks and actions are played again."""
        process, connection = self.workers[w]
        process.kill()
        process.wait()
        connection.close()
        self._start(w)
        requests, wanted = [], []
        for slot, items in self.played.items():
            if self.worker_of[slot] == w:
                requests += [(slot, item) for item in items]
                wanted += [False] * (len(items) - 1) + [slot in unanswered]
        self._post(w, requests, wanted)


# ---------------------------------------------------------------------------------------------------------------------
# Text and tokens
# ---------------------------------------------------------------------------------------------------------------------


class Chat:
    """How a conversation becomes tokens: the task and first observation in the first user message, one observation in
    each later one, one action in each assistant message.

    Token in, token out: what the policy has sampled stays as it is, is never decoded and encoded again. What the
    template puts *between* an action and the next observation is read off the template once, here, and appended as
    observation tokens:

        <start> prompt(obs_0) | action_0 <eot> | follow_up(obs_1) | action_1 <eot> | ...

    Attributes: `eot_id`, the token that ends an assistant message; `rewrites_history`, whether the template would write
    earlier turns otherwise (thinking models drop text; some tokenizers cut it otherwise) where we keep the tokens.
    """

    def __init__(self, tokenizer):
        """
        Raises:
            UserError: the tokenizer has no chat template, or one that does not mark the end of a turn.
        """
        if not tokenizer.chat_template:
            raise UserError(
                f"--model {tokenizer.name_or_path}: its tokenizer has no chat template; take an instruct model, or "
                "save the tokenizer with a `chat_template` (ChatML, say) beside the weights"
            )
        self.tokenizer = tokenizer
        reply = "<think>\nhm\n</think>\n\nACT_TEXT"
        user, assistant = {"role": "user", "content": "OBS_TEXT"}, {"role": "assistant", "content": reply}
        before, after = self._render([user]).split("OBS_TEXT")
        whole = self._render([user, assistant, user])
        # The text after the action: <eot>, the next message's header, OBS, and the header of the next action.
        between, _ = whole.split("ACT_TEXT")[1].split("OBS_TEXT")
        encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
        self.before, self.after = encode(before), encode(after)
        eot, *self.between = encode(between.lstrip(" "))
        if eot not in tokenizer.all_special_ids and eot not in tokenizer.added_tokens_decoder:
            raise UserError(
                f"--model {tokenizer.name_or_path}: its chat template ends an assistant turn with {between[:20]!r}, "
                "which does not begin with a special token; the policy could not end its action"
            )
        self.eot_id = eot
        # A template made for single conversations may begin each exchange with BOS; one conversation has one. (A BOS
        # that opens or ends every message is another matter: it stays.)
        repeated = {tokenizer.bos_token_id} - {eot, *self.after}
        self.between = [token for token in self.between if token not in repeated]
        played = self.prompt("OBS_TEXT") + self.action(reply) + self.follow_up("OBS_TEXT", ended=True)
        first, *others = encode(whole)
        self.rewrites_history = played != [first, *(token for token in others if token not in repeated)]

    def prompt(self, obs: str) -> list[int]:
        """Tokens of the first user message and of what the template puts before the first action."""
        return self.before + self._encode(obs) + self.after

    def follow_up(self, obs: str, ended: bool) -> list[int]:
        """Tokens between an action and the next. `ended`: the action's own last token was <eot>; an action cut at the
        token limit lacks it, so it comes here, as an observation token."""
        return ([] if ended else [self.eot_id]) + self.between + self._encode(obs) + self.after

    def action(self, text: str) -> list[int]:
        """Tokens of an action that somebody else chose (a demonstration), <eot> included."""
        return self._encode(text) + [self.eot_id]

    def text(self, tokens: list[int]) -> str:
        """The sampled tokens of one action as text, for the environment alone."""
        tokens = tokens[:-1] if tokens and tokens[-1] == self.eot_id else tokens
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def _render(self, messages: list[dict]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _encode(self, text: str) -> list[int]:
        # Text that looks like a special token ("<|im_end|>" in a game's name) stays text.
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
