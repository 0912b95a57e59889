"""The syntax tree of a template, so that whatever can cost work or memory is a call into the sandbox.

Jinja2 compiles comparisons, `~`, slices, loops and literals to Python's own, which ask nobody. Here each becomes a
filter with a name no template can write (it begins with a space), so the compiler makes a plain call of it.

What a straight line of code costs is known from the tree: a loop pays its body's weight for each item, a macro its own
for each call. One unit is about 0.1 us, and pays for 16 bytes that nobody counts.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from llmrun.engine.templating.budget import OverBudget

DEEPEST_TREE = 80  # Python allows 200 brackets in brackets, and a level makes two at most
MOST_BRANCHES = 60  # of one `if`: Python's parser recurses into `elif`
MOST_IFS_AND_NAMES = 1_000_000  # one times the other, as Jinja2 looks at every name for each `if`; real ones: 4,536


class Inner:
    """The names of the filters below."""

    MARK = " "
    LOOP = " loop"
    PAY = " pay"
    LITERAL = " literal"
    DICT = " dict"
    SPREAD = " spread"
    SPREAD_NAMED = " spread named"
    CONCATENATE = " ~"
    COMPARE = " compare"
    COMPARE_ALL = " compare all"
    SLICE = " slice"


_OFFERED: frozenset[type[nodes.Node]] = frozenset(
    (
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Macro, nodes.CallBlock),
        *(nodes.FilterBlock, nodes.Assign, nodes.AssignBlock, nodes.With, nodes.Break, nodes.Continue),
        *(nodes.Const, nodes.Name, nodes.NSRef, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword),
        *(nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice),
        *(nodes.Concat, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos),
        *(nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow),
    )
)
_WEIGHTS: dict[type[nodes.Node], int] = {
    nodes.For: 20,
    nodes.Macro: 60,
    nodes.CallBlock: 60,
    nodes.Keyword: 10,
    nodes.Call: 12,
    nodes.Filter: 8,
    nodes.Test: 5,
    nodes.Getattr: 5,
    nodes.Getitem: 5,
    nodes.Output: 2,
    **dict.fromkeys((nodes.List, nodes.Dict, nodes.Tuple, nodes.Neg, nodes.Pos), 4),
    **dict.fromkeys((nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow), 5),
}


def check_tree(tree: nodes.Template) -> None:
    """Refuses statements a chat template has no use for, and trees too deep for a compiler. Does not recurse."""
    level: list[nodes.Node] = [tree]
    depth = ifs = 0
    names: set[str] = set()
    while level:
        depth += 1
        below: list[nodes.Node] = []
        for node in level:
            if type(node) not in _OFFERED:
                raise OverBudget(f"{type(node).__name__.lower()} is not for chat templates", node.lineno)
            if depth > DEEPEST_TREE:
                raise OverBudget(f"an expression is nested more than {DEEPEST_TREE} deep", node.lineno)
            if isinstance(node, nodes.Name):
                names.add(node.name)
            elif isinstance(node, nodes.If):
                ifs += 1
                if len(node.elif_) > MOST_BRANCHES:
                    raise OverBudget(f"more than {MOST_BRANCHES} branches of one if", node.lineno)
            below.extend(node.iter_child_nodes())
        level = below
    if ifs * len(names) > MOST_IFS_AND_NAMES:
        raise OverBudget(f"{ifs:,} ifs and {len(names):,} names, limit {MOST_IFS_AND_NAMES:,} of one times the other")


class Rewriter(NodeTransformer):
    """Visits what `check_tree` let pass; `visit_X` gives what takes the place of an X."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - Jinja2's name
        self.generic_visit(node)
        return _inner(Inner.CONCATENATE, nodes.Tuple(node.nodes, "load", lineno=node.lineno))

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        given: list[nodes.Expr] = []
        for operand in node.ops:
            given += [nodes.Const(operand.op, lineno=node.lineno), operand.expr]
        return _inner(Inner.COMPARE if len(node.ops) == 1 else Inner.COMPARE_ALL, node.expr, *given)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _inner(Inner.LITERAL, node) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _inner(Inner.LITERAL, node) if node.items and node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        pairs = [nodes.Tuple([pair.key, pair.value], "load", lineno=node.lineno) for pair in node.items]
        return _inner(Inner.DICT, nodes.Tuple(pairs, "load", lineno=node.lineno)) if pairs else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        nothing = nodes.Const(None, lineno=node.lineno)
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _inner(Inner.SLICE, node.node, *(bound or nothing for bound in bounds))

    def visit_Neg(self, node: nodes.Neg) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.node, nodes.Const) and type(node.node.value) in (int, float):
            return nodes.Const(-node.node.value, lineno=node.lineno)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        return self._with_spread(node)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        return self._with_spread(node)

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        return self._with_spread(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        steps = 4 + _weight(node.body) + (_weight([node.test]) if node.test else 0)
        if node.recursive:  # `loop(items)` comes past the filter, but not past the body
            node.body.insert(0, _payment(steps, node))
            steps = 1
        node.iter = _inner(Inner.LOOP, node.iter, nodes.Const(steps, lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._with_payment(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        return self._with_payment(node)

    def _with_payment(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _payment(4 + _weight([*node.defaults, *node.body]), node))
        return node

    def _with_spread(self, node: nodes.Call | nodes.Filter | nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _inner(Inner.SPREAD, node.dyn_args)
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = _inner(Inner.SPREAD_NAMED, node.dyn_kwargs)
        return node


def _inner(name: str, value: nodes.Node, *arguments: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [*arguments], [], None, None, lineno=value.lineno)


def _payment(steps: int, node: nodes.Node) -> nodes.Stmt:
    return nodes.ExprStmt(_inner(Inner.PAY, nodes.Const(steps, lineno=node.lineno)), lineno=node.lineno)


def _weight(tree: list[Any]) -> int:
    """What going once through these nodes costs, without the bodies that pay for themselves."""
    total = 0
    waiting: list[nodes.Node] = list(tree)
    while waiting:
        node = waiting.pop()
        total += _WEIGHTS.get(type(node), 1)
        if isinstance(node, nodes.For):
            waiting += [node.iter, *node.else_]
        elif isinstance(node, nodes.CallBlock):
            waiting.append(node.call)
        elif not isinstance(node, nodes.Macro):
            waiting.extend(node.iter_child_nodes())
    return total
