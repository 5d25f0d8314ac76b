"""Problems about parts of the configuration that apply to nothing."""

from __future__ import annotations

from bitwright.config.matching import ModuleRules

from .plan import Problem

__all__ = ["unmatched_problems"]


def unmatched_problems(rules: ModuleRules) -> list[Problem]:
    """Return one problem per key that matched nothing, or only what a stronger key owns.

    Call it after every op was looked up, because keys of ops are known to match only then.
    """
    problems = [
        Problem("unmatched-key", key.where, f"{_without_where(str(key), key.where)} {_REMEDY}")
        for key in (*rules.unmatched, *rules.unmatched_op_keys(), *rules.unmatched_state_keys())
    ]
    problems += [Problem("shadowed-key", key.where, _without_where(str(key), key.where)) for key in rules.shadowed]
    return problems


_REMEDY = "Correct the key or remove it."


def _without_where(text: str, where: str) -> str:
    return text.removeprefix(where).strip()
