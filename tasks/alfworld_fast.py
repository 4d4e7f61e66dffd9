"""ALFWorld's engine (TextWorld's PDDL environment, version 1.7.0) without the work that it repeats.

`install_fast_engine` patches it in this process. What the engine says stays the same to the byte: observations,
admissible commands, facts and rewards (`benchmark/alfworld_engine.py` compares them by hash with the stock engine,
each in its own process). Each patch says what it removes and why that changes nothing.

Every cache is bounded, so that a process can play thousands of games; nothing that a cache holds is changed by a game.
"""

import functools
import gc
import re
import sys
from operator import itemgetter
from types import SimpleNamespace

import fast_downward
import textworld.envs.pddl.logic as pddl_logic
import textworld.envs.pddl.textgen as textgen
import textworld.logic
from textworld.envs.pddl.textgen import ContextSensitiveGrammar, ProductionRule, Symbol

_installed = False


def install_fast_engine():
    """Patch TextWorld's PDDL engine in this process; a second call does nothing."""
    global _installed
    if not _installed:
        _installed = True
        _translate_once()
        _parse_once()
        _derive_once()


def _translate_once():
    """PDDL to SAS: the stock engine translates a problem four times for one episode, twice in load, twice in reset."""
    translate = fast_downward.pddl2sas

    @functools.lru_cache(maxsize=16)  # games
    def translated(domain, problem):
        argv, stdout = sys.argv, sys.stdout  # the translator overwrites the one and swaps the other
        collecting = gc.isenabled()
        gc.disable()  # a million small objects, hardly a cycle among them: collections would take half of the time
        try:
            _patch_translator()
            task, sas = translate(domain, problem)
        finally:
            sys.argv, sys.stdout = argv, stdout
            if collecting:
                gc.enable()
        # The engine reads four fields and changes none; the rest of the task would keep megabytes alive.
        return SimpleNamespace(actions=task.actions, types=task.types, objects=task.objects, init=task.init), sas

    def pddl2sas(domain, problem, verbose=False, optimize=False):
        # `optimize` asks for another translation of the same game that only the planner reads; nothing here plans
        # (the planner can hang), and without `policy_commands` the engine does not either.
        return translated(domain, problem)

    fast_downward.pddl2sas = pddl2sas


@functools.lru_cache(maxsize=1)  # once; importing the translator reads sys.argv, so not before the first translation
def _patch_translator():
    """The translator's inner loop, and an ordering of variables that only planning needs."""
    sys.argv = ["translate.py", "domain", "task"]
    from fast_downward.translate import build_model, options

    build_model.compute_model = functools.partial(_compute_model, build_model)
    # The order of the variables is a matter of search speed; states, actions and facts are the same in any order.
    options.reorder_variables = False


def _compute_model(build_model, prog):
    """All atoms that follow from the facts by the rules of a Datalog program, in the order of the stock function.

    It spends most of its time in join rules (two conditions that share variables), looking up, for each atom and
    each rule, which arguments are shared and where they go. Here that is worked out once per rule.
    """
    rules = build_model.convert_rules(prog)
    unifier = build_model.Unifier(rules)
    model = sorted(fact.atom for fact in prog.facts)
    known = {(atom.predicate, *atom.args) for atom in model}
    make_atom = type(model[0])

    def push(predicate, args):
        key = (predicate, *args)
        if key not in known:
            known.add(key)
            model.append(make_atom(predicate, key[1:]))

    joins = {}
    for rule in rules:
        if isinstance(rule, build_model.JoinRule):
            shared = [itemgetter(*positions) for positions in rule.common_var_positions]
            # (argument of the condition, argument of the effect); an effect's arguments are numbered, constants not
            moves = [[(i, j) for i, j in enumerate(c.args) if isinstance(j, int)] for c in rule.conditions]
            joins[rule] = shared, moves, ({}, {}), rule.effect.predicate, list(rule.effect.args)

    for atom in model:  # grows while it is read
        args = atom.args
        for rule, condition in unifier.unify(atom):
            if rule not in joins:
                rule.update_index(atom, condition)
                rule.fire(atom, condition, push)
                continue
            shared, moves, seen, predicate, effect = joins[rule]
            key = shared[condition](args)
            seen[condition].setdefault(key, []).append(args)
            partners = seen[1 - condition].get(key)
            if partners:
                effect = effect.copy()
                for i, j in moves[condition]:
                    effect[j] = args[i]
                for partner in partners:
                    for i, j in moves[1 - condition]:
                        effect[j] = partner[i]
                    push(predicate, effect)
    return model


def _parse_once():
    """Text templates, the grammar file and the queries in it are parsed anew for every game, command or answer."""
    parse_template = textgen._parse_and_convert
    parse_grammar = pddl_logic._parse_and_convert

    @functools.lru_cache(maxsize=1024)  # templates; the grammar has about 60, each goal adds one
    def template(text, rule_name):
        return tuple(parse_template(text, rule_name=rule_name))

    def parsed_template(text, rule_name="symbols", **_):
        # The engine writes contexts into the symbols that it gets, so it gets copies.
        return [_copy(symbol) for symbol in template(text, rule_name)]

    @functools.lru_cache(maxsize=8)  # grammar files; all games of ALFWorld have the same but for the task's sentence
    def grammar_without_task(text, rule_name):
        return parse_grammar(text, rule_name=rule_name)

    def parsed_grammar(text, rule_name="pddlStart", **_):
        sentence = re.search(r'"(Your task is to: [^"\\]*)"', text)
        if not sentence:
            return parse_grammar(text, rule_name=rule_name)
        actions, shared = grammar_without_task(text[: sentence.start()] + '""' + text[sentence.end() :], rule_name)
        # The rules can be shared: the engine copies their symbols before use. The lists of rules are the game's own.
        grammar = ContextSensitiveGrammar()
        grammar.update(shared)
        grammar._rules["task"] = [ProductionRule("task", parsed_template(sentence[1]), condition="")]
        return actions, grammar

    textgen._parse_and_convert = parsed_template
    pddl_logic._parse_and_convert = parsed_grammar
    rule = textworld.logic.Rule  # rules are only read
    rule.parse_conjunctive_query = staticmethod(functools.lru_cache(maxsize=1024)(rule.parse_conjunctive_query))


def _copy(symbol):
    """A copy of a parsed symbol and of the symbols inside it."""
    copy = object.__new__(type(symbol))
    copy.__dict__.update({k: _copy(v) if isinstance(v, Symbol) else v for k, v in vars(symbol).items()}, context={})
    return copy


def _derive_once():
    """Contexts are deep-copied for every symbol, and the text of every command is derived again on every turn."""

    def copy_context(context):
        # Only the two dicts are written to; what they hold (variables, names) is read.
        return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}

    derive_text = ContextSensitiveGrammar.derive

    def derive(self, start, context=None):
        # Feedback ("#...#") depends on the state. A command's text depends on names and on where the receptacles
        # stand, which no action changes, so it is kept: in the grammar object, of which each loaded game has its own.
        if start.startswith("#"):
            return derive_text(self, start, context or {})
        kept = vars(self).setdefault("_commands", {})
        key = (start, *((placeholder.name, variable.name) for placeholder, variable in context["mapping"].items()))
        if key not in kept:
            kept[key] = derive_text(self, start, context)
        return kept[key]

    textgen.copy_context = copy_context
    ContextSensitiveGrammar.derive = derive
