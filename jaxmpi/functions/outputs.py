"""Outputs of a function: trees of reductions laid flat, results put back."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxmpi.core.errors import UsageError, check
from jaxmpi.core.pytrees import PyTree, path_name
from jaxmpi.functions.reductions import Output, from_word


class ChosenOutputs(NamedTuple):
    """The outputs that a call computes."""

    structure: Any  # tree structure of the value that is returned
    returned: tuple[int, ...]  # numbers of its leaves, in its order
    computed: tuple[int, ...]  # numbers of all, ascending


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """A tree of reductions per output; each reduces all leaves below it."""

    trees: tuple[PyTree, ...]  # trees of `Output`
    is_single: bool  # one output, which the function returns in no tuple

    @functools.cached_property
    def flat(self) -> tuple[Output, ...]:
        """All reductions, in order."""
        return tuple(jax.tree.leaves(self.trees))

    @functools.cached_property
    def numbers(self) -> tuple[PyTree, ...]:
        """The trees with the number in `flat` in place of each reduction."""
        return jax.tree.unflatten(jax.tree.structure(self.trees), range(len(self.flat)))

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Which output each reduction is of, and its path there, for messages."""
        paths = [
            (place, path_name(path))
            for place, tree in enumerate(self.trees)
            for path, _ in jax.tree_util.tree_leaves_with_path(tree)
        ]
        return tuple(f"{place} {path!r}" if path else str(place) for place, path in paths)

    def split(self, name: str, results: Sequence[PyTree]) -> list[PyTree]:
        """Split the results of function `name` into a part for each reduction.

        Raises:
            UsageError: an output has another structure than its reductions.
        """
        parts = []
        for place, (tree, result) in enumerate(zip(self.trees, results, strict=True)):
            wanted = jax.tree.structure(tree)
            try:
                parts += wanted.flatten_up_to(result)
            except ValueError as error:
                got = jax.tree.structure(result)
                raise UsageError(
                    f"{name}: output {place}: got a tree {got} for reductions {wanted}; expected the same keys, or one "
                    "reduction for all below it"
                ) from error
        return parts

    @functools.cached_property
    def all(self) -> ChosenOutputs:
        """All outputs."""
        return self._choose_numbers(self.numbers[0] if self.is_single else self.numbers)

    def chosen(self, subset: Any) -> ChosenOutputs:
        """The outputs asked for; None asks for all.

        Args:
            subset: places of outputs in their tuple, or keys if the one output is a dict.

        Raises:
            UsageError: no such output, or one twice.
        """
        if subset is None:
            return self.all
        tree = self.numbers[0] if self.is_single else dict(enumerate(self.numbers))
        check(
            isinstance(tree, dict), "output_subset: got a choice of outputs, but there is only one, and it is no dict"
        )
        expected = f"expected some of {sorted(tree, key=str)} in a list, each once"
        check(isinstance(subset, (tuple, list)), f"output_subset: got {subset!r}; {expected}")
        known = all(isinstance(key, (str, int)) and key in tree for key in subset)
        check(known and len(set(subset)) == len(subset), f"output_subset: got {list(subset)!r}; {expected}")
        picked = {key: tree[key] for key in subset}
        return self._choose_numbers(picked if self.is_single else tuple(picked.values()))

    def _choose_numbers(self, numbers: PyTree) -> ChosenOutputs:
        """Choose outputs by number; a tuple leaves out those kept in variables."""
        computed = tuple(sorted(jax.tree.leaves(numbers)))
        if not self.is_single:
            numbers = tuple(one for one in numbers if not (isinstance(one, int) and self.flat[one].into is not None))
        leaves, structure = jax.tree.flatten(numbers)
        return ChosenOutputs(structure, tuple(leaves), computed)


def join_results(chosen: ChosenOutputs, results: dict[int, PyTree]) -> PyTree:
    """Results in the user's trees.

    A result that is kept in a variable is None, but the tuple of several outputs leaves it out.
    """
    return jax.tree.unflatten(chosen.structure, map(results.get, chosen.returned))


def parse_outputs(outputs: Any) -> Outputs:
    """The outputs that a user names; a tuple or list is several.

    Raises:
        UsageError: a leaf is no reduction and no name of one.
    """
    is_single = type(outputs) not in (tuple, list)
    trees = (outputs,) if is_single else tuple(outputs)
    trees = jax.tree.map(from_word, trees, is_leaf=lambda leaf: leaf is None)
    for output in jax.tree.leaves(trees, is_leaf=lambda leaf: leaf is None):
        check(
            isinstance(output, Output) and output.op != "add",
            f"outputs: got {output!r}; expected jaxmpi.functions.mean, sum, prod, min, max, gather, local or a name, "
            "or a tree of them",
        )
    return Outputs(trees=trees, is_single=is_single)
