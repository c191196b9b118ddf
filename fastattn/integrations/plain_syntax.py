"""The code of a function without what does not change its result, to compare it with other code.

Annotations, decorators and the docstring are left out. A function of assignments and one `return`
becomes a single expression, in which the spellings of a cast and of a call of torch's norms are one
and a single argument is called x.
"""

import ast
from dataclasses import dataclass

# The nodes of an expression are limited, because values that are used twice double it.
_MAX_NODES = 500
# Expressions with names of their own.
_SCOPES = (ast.Lambda, ast.comprehension, ast.NamedExpr)
# Parameters of torch.nn.functional and their defaults.
_NORMS: dict[str, tuple[tuple[str, float | None], ...]] = {
    "layer_norm": (("weight", None), ("bias", None), ("eps", 1e-5)),
    "rms_norm": (("weight", None), ("eps", None)),
}


@dataclass(frozen=True)
class Syntax:
    """The arguments and the body, as text, and the names that the function's code contains."""

    code: str
    names: frozenset[str]


def plain_syntax(function: ast.AST) -> Syntax | None:
    """None for a node that is no function. The name `past_key_values` of transformers before 5.24
    becomes `cache`.
    """
    if not isinstance(function, ast.FunctionDef):
        return None
    names = _names(function)
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    result = _as_expression(body)
    if result is None:
        text = "\n".join(map(ast.unparse, (function.args, *body)))
        return Syntax(text.replace("past_key_values", "cache"), names)
    arguments = ast.unparse(function.args)
    parameters = arguments.split(", ")
    if len(parameters) == 2 and parameters[1].isidentifier() and "x" not in _names(result):
        result = _Substitute({parameters[1]: _name("x")}).visit(result)
        arguments = f"{parameters[0]}, x"
    code = f"{arguments}\nreturn {ast.unparse(_Plain().visit(_copied(result)))}"
    return Syntax(code.replace("past_key_values", "cache"), names)


def _as_expression(body: list[ast.stmt]) -> ast.expr | None:
    """The value that assignments and a `return` compute; None for other code."""
    values: dict[str, ast.expr] = {}
    unused: set[str] = set()
    for statement in body:
        value = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
        if value is None or any(isinstance(node, _SCOPES) for node in ast.walk(value)):
            return None
        substitute = _Substitute(values)
        value = substitute.visit(_copied(value))
        unused -= substitute.found
        if sum(1 for _ in ast.walk(value)) > _MAX_NODES:
            return None
        if isinstance(statement, ast.Return):
            is_last = statement is body[-1]
            return value if is_last and not unused else None
        assert isinstance(statement, ast.Assign)
        (target, *others) = statement.targets
        if others or not isinstance(target, ast.Name) or target.id in unused:
            return None
        values[target.id] = value
        unused.add(target.id)
    return None


class _Substitute(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]) -> None:
        self.values = values
        self.found: set[str] = set()

    def visit_Name(self, node: ast.Name) -> ast.expr:
        self.found.add(node.id)
        return self.values.get(node.id, node)


class _Plain(ast.NodeTransformer):
    """One spelling: F for torch.nn.functional, x.float(), x.to(dtype), x.shape[i], positional
    arguments of norms with their defaults.
    """

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        is_functional = ast.unparse(node) in ("nn.functional", "torch.nn.functional")
        return _name("F") if is_functional else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        called = node.func
        if not isinstance(called, ast.Attribute):
            return node
        given = [*node.args, *(k.value for k in node.keywords)]
        keywords = [k.arg for k in node.keywords]
        of, method = called.value, called.attr
        if method in ("to", "type", "type_as") and len(given) == 1 and keywords in ([], ["dtype"]):
            dtype = given[0]
            if method == "type_as":
                dtype = ast.Attribute(dtype, "dtype", ast.Load())
            if ast.unparse(dtype) in ("torch.float32", "torch.float"):
                return ast.Call(ast.Attribute(of, "float", ast.Load()), [], [])
            return ast.Call(ast.Attribute(of, "to", ast.Load()), [dtype], [])
        if method == "size" and len(given) == 1 and keywords in ([], ["dim"]):
            return ast.Subscript(ast.Attribute(of, "shape", ast.Load()), given[0], ast.Load())
        if method in _NORMS and isinstance(of, ast.Name) and of.id == "F" and len(node.args) >= 2:
            rest = _NORMS[method][len(node.args) - 2 :]
            named = {k.arg: k.value for k in node.keywords}
            if named.keys() <= {name for name, _ in rest}:
                filled = [named.get(name, ast.Constant(default)) for name, default in rest]
                return ast.Call(called, [*node.args, *filled], [])
        return node


def _names(node: ast.AST) -> frozenset[str]:
    return frozenset(part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _copied(value: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(value), mode="eval").body
