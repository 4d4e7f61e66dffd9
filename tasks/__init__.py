"""What makes or finds games, and the engines that play them; only `envs.py` imports this package.

Each module has `list_tasks(names, split)` (which games a split holds; UserError for unknown names),
`describe(tasks, split)` (one line for the user), and an `Engine(admissible: bool)` with three methods:

    reset(task) -> State        load the game and start it; the same engine plays one game after another
    step(action) -> State       one turn
    expert_action() -> str      what the demonstrator would do now

Turn limits, rewards, prompts and time limits are `envs.py`'s business, the same for every engine.
"""

from dataclasses import dataclass, field


class UserError(Exception):
    """Something that the user can mend; the scripts print it as one line, without a traceback, and exit with 2."""


@dataclass(frozen=True)
class Task:
    """One game instance; the episodes of a group share it. The same fields give the same game on every machine."""

    env: str  # "textworld" or "alfworld"
    name: str  # what is played: "w2-o3-q4", "pick_and_place_simple"
    seed: int = 0  # of a generated game
    path: str = ""  # of a game file that somebody else made, relative to the data set's folder

    @property
    def task_id(self) -> str:
        return self.path or f"{self.name}/{self.seed}"


@dataclass
class State:
    """What an engine says after `reset` and after each `step`."""

    obs: str  # what the game printed: the whole feedback, without banner, prompt and status line
    progress: float  # in [0, 1]; 1 exactly when `won`
    won: bool = False  # the engine's own word for it, never "the game is over"
    over: bool = False  # the game accepts no more actions: won or lost
    goal: str = ""  # the task in words; `reset` alone fills it
    max_score: float = 1.0  # what the game's own score can reach
    admissible: list[str] = field(default_factory=list)  # commands that the engine would accept now
