"""The demonstrator for ALFWorld: it searches as somebody would who knows only what the game has shown so far.

It never looks at the engine's state. It knows the goal, the list of receptacles in the first observation, ALFWorld's
own table of plausible places (`VAL_RECEPTACLE_OBJECTS`), and what the observations said since. Its rule is
deterministic and can be read off the history, so a small policy can copy it:

    not holding, thing seen      go to the first listed receptacle that has it, open it, take it
    not holding, nothing seen    go to the next unvisited receptacle, in this order: plausible open places, plausible
                                 closed ones (cabinets, drawers, ...), the rest; within each as listed. Open it.
    holding the thing            clean, heat or cool it at the first listed sink, microwave or fridge if asked to;
                                 carry it to the target receptacle, open that, put it down
    look_at                      holding the thing: find the lamp by the same search, use it
    pick_two                     the second thing goes where the first one lies
"""

import re

from alfworld.gen.constants import OPENABLE_CLASS_LIST, VAL_RECEPTACLE_OBJECTS

PLAUSIBLE = {rtype.lower(): {o.lower() for o in otypes} for rtype, otypes in VAL_RECEPTACLE_OBJECTS.items()}
CLOSED = {rtype.lower() for rtype in OPENABLE_CLASS_LIST}
LAMP_PLACES = {"coffeetable", "desk", "diningtable", "dresser", "shelf", "sidetable"}  # the table has no lamps
DEVICES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}

LIST = re.compile(r"you see (.*?)\.(?:\n|$)")
CONTENTS = re.compile(r"(?:On the ([^,.]+)|The ([^,.]+) is open\. In it), you see (.*?)\.(?:\n|$)")


def kind(name):
    """The type in a name: "mug" for "mug 2"."""
    return name.split(" ")[0]


def listed(text):
    """The names in "a mug 2, a cup 1, and a pan 1", in order; none in "nothing"."""
    return [] if text == "nothing" else re.findall(r"(?:^|, (?:and )?)an? ([^,]+)", text)


class SearchingExpert:
    """One episode's demonstrator. Call `act` for the next action and `observe` after every turn, whoever chose it."""

    def __init__(self, goal, obs):
        """Args: goal, an `alfworld.Goal`; obs, the first observation."""
        self.goal = goal
        self.receptacles = listed(LIST.search(obs)[1]) if LIST.search(obs) else []
        self.contents = {}  # receptacle: names seen in it; no key before its contents have been seen
        self.visited = set()  # receptacles that need no second look
        self.opened = set()
        self.refused = set()  # actions that the game answered with "Nothing happens."
        self.here = ""
        self.held = ""
        self.treated = set()  # things that were cleaned, heated or cooled as the goal asks

    def observe(self, action, obs):
        """Learn from one turn: the action as the game got it and what the game answered."""
        verb, _, rest = action.partition(" ")
        thing, _, place = re.sub(r" (from|to|with) ", "\n", rest.removeprefix("to ")).partition("\n")
        if obs.startswith("Nothing happens"):
            self.refused.add(action)
            if verb == "go":  # one is already there: two receptacles can stand in one place
                self.here = thing
            elif verb == "take" and thing in self.contents.get(place, []):
                self.contents[place].remove(thing)
            elif verb == "open":
                self.visited.add(thing)
            return
        if verb == "go":
            self.here = thing
            self.visited.add(thing)
        elif verb == "open":
            self.opened.add(thing)
            self.visited.add(thing)
        elif verb == "close":
            self.opened.discard(thing)
        elif verb == "take":
            self.held = thing
            if thing in self.contents.get(place, []):
                self.contents[place].remove(thing)
        elif verb == "move":
            self.held = ""
            self.contents.setdefault(place, []).append(thing)
        elif verb == self.goal.verb:
            self.treated.add(thing)
        elif verb in ("heat", "cool"):  # the one undoes the other
            self.treated.discard(thing)
        seen = CONTENTS.search(obs)
        if seen:
            self.contents[seen[1] or seen[2]] = listed(seen[3])

    def act(self):
        """The action to take now."""
        goal = self.goal
        if self.held and kind(self.held) != goal.obj:  # somebody else's choice: put it down again
            return self._put_down()
        if not self.held:
            target = self._target()
            done = [] if target is None else self._finished(target)
            where = self._seen(lambda name, place: kind(name) == goal.obj and not (place == target and name in done))
            if where:
                return self._at(where[1], f"take {where[0]} from {where[1]}")
            return self._search(goal.obj, PLAUSIBLE, skip=goal.rtype if goal.count == 1 and not goal.verb else "")
        if goal.lamp:
            where = self._seen(lambda name, place: kind(name) == goal.lamp)
            if where:
                return self._at(where[1], f"use {where[0]}", opening=False)
            return self._search(goal.lamp, dict.fromkeys(LAMP_PLACES, {goal.lamp}))
        if goal.verb and self.held not in self.treated:
            for device in self.receptacles:
                action = f"{goal.verb} {self.held} with {device}"
                if kind(device) == DEVICES[goal.verb] and action not in self.refused:
                    return self._at(device, action, opening=False)
        target = self._target()
        return self._at(target, f"move {self.held} to {target}") if target else self._put_down()

    def _finished(self, place):
        """What lies in this receptacle and would count for the goal if the receptacle is of the goal's type."""
        names = [name for name in self.contents.get(place, []) if kind(name) == self.goal.obj]
        return [name for name in names if not self.goal.verb or name in self.treated]

    def _target(self):
        """Where the goal's things go: the receptacle of the goal's type that has most of them, else the first."""
        options = [r for r in self.receptacles if kind(r) == self.goal.rtype]
        options = [r for r in options if f"move {self.held} to {r}" not in self.refused] or options
        return max(options, key=lambda r: len(self._finished(r)), default=None)

    def _seen(self, wanted):
        """The first (name, receptacle) seen that is wanted, in the order of the first observation."""
        for place in self.receptacles:
            for name in self.contents.get(place, []):
                if wanted(name, place):
                    return name, place
        return None

    def _at(self, place, action, opening=True):
        """Do `action` at `place`: go there and open it first where needed."""
        if self.here != place:
            return f"go to {place}"
        # A place whose contents were seen is open; some drawers of the real games cannot be opened or closed at all.
        known = place in self.opened or place in self.contents or f"open {place}" in self.refused
        return action if known or not opening or kind(place) not in CLOSED else f"open {place}"

    def _search(self, thing, places, skip=""):
        """Look into the next receptacle: plausible open ones, plausible closed ones, then the others, as listed."""
        if self.here and self.here not in self.contents and self._unseen_here():
            return self._unseen_here()

        def rank(place):
            return 2 if thing not in places.get(kind(place), ()) else 1 if kind(place) in CLOSED else 0

        left = [r for r in self.receptacles if r not in self.visited and r not in self.contents and kind(r) != skip]
        return f"go to {min(left, key=rank)}" if left else "look"

    def _unseen_here(self):
        """What shows the contents of the receptacle in front of which the expert stands, or ""."""
        if kind(self.here) in CLOSED and f"open {self.here}" not in self.refused and self.here not in self.opened:
            return f"open {self.here}"
        return f"examine {self.here}" if f"examine {self.here}" not in self.refused else ""

    def _put_down(self):
        """Put the thing in hand into the first receptacle that takes it."""
        rest = [r for r in self.receptacles if f"move {self.held} to {r}" not in self.refused]
        rest.sort(key=lambda r: (kind(self.held) not in PLAUSIBLE.get(kind(r), ()), r != self.here))
        return self._at(rest[0], f"move {self.held} to {rest[0]}") if rest else "look"
