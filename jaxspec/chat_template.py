"""Chat templates: programs from a model's files, run in jinja2's sandbox.

The sandbox keeps a template from Python's internals and from changing its inputs.
Here the template's size, its steps and the text it makes are bounded as well; a
template made to exhaust the memory in few steps is not stopped by that.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxspec.errors import UserError, refuse

MAX_TEMPLATE = 64 * 1024
MAX_RENDERED = 4 * 1024 * 1024
MAX_STEPS = 300_000

# Marks for training in some templates: comments here, which keep the text inside.
_GENERATION_TAG = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")


class ChatTemplate:
    """A compiled chat template; `where` it came from is for messages.

    Raises:
        UserError: the template is too long or does not compile.
    """

    def __init__(self, source: str, where: str):
        self._where = where
        if len(source) > MAX_TEMPLATE:
            raise self._error(f"has {len(source)} characters, over {MAX_TEMPLATE}")
        self._sandbox = _Sandbox()
        try:
            self._template = self._sandbox.compile_counted(source)
        # A template can raise whatever an expression can: it is the file's code.
        except Exception as error:
            raise self._error(f"does not compile: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Returns the text the template makes of `messages` and other `variables`.

        Raises:
            UserError: the messages are malformed or refused by the template, or the
                template breaks a bound.
        """
        _check_messages(messages)
        variables["messages"] = [dict(message) for message in messages]
        self._sandbox.steps_left = MAX_STEPS
        try:
            return _joined(self._template.generate(variables))
        except Exception as error:
            raise self._error(f"refused or failed: {error}") from None

    def _error(self, what: str) -> UserError:
        return UserError(
            f"{self._where}: the chat template {' '.join(what.split())}; check the "
            "messages' roles and order, or use the template of the original model"
        )


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with what chat templates expect, and a count of steps."""

    intercepted_binops = frozenset(["*", "**"])
    steps_left = MAX_STEPS

    def __init__(self):
        loops = ["jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=loops)
        # Makes texts of any length.
        del self.globals["lipsum"]
        self.globals |= {"tools": None, "documents": None}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        self.filters["_counted"] = _counted

    def compile_counted(self, source: str) -> Template:
        """Compiles `source` so that each pass of a loop takes a step."""
        tree = self.parse(_GENERATION_TAG.sub(r"{#\1 \2#}", source))
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None)
        tree.set_environment(self)
        return self.from_string(tree)

    def take_step(self) -> None:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise OverflowError(f"more than {MAX_STEPS} loop steps and calls")

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.take_step()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(v) if hasattr(v, "__len__") else v for v in (left, right)]
        if operator == "**" or abs(sizes[0] * sizes[1]) > MAX_RENDERED:
            raise OverflowError("a power, or a product that is too large")
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        # jinja2 waits until the value is used, and prints it as an empty text.
        raise SecurityError(f"access to {attribute!r} of {type(obj).__name__} object")


# With the context passed, jinja2 does not run the filter while compiling.
@pass_context
def _counted(context: Any, items: Iterable[Any]) -> Iterable[Any]:
    for item in items:
        context.environment.take_step()
        yield item


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _joined(pieces: Iterable[str]) -> str:
    parts, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MAX_RENDERED:
            raise OverflowError(f"a text of more than {MAX_RENDERED} characters")
        parts.append(piece)
    return "".join(parts)


def _check_messages(messages: Any) -> None:
    expected = 'expected a list of {"role": str, "content": str}'
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"messages is no list with entries; {expected}")
    faults = [
        f"message {index}: {key!r} is missing or not a text"
        for index, message in enumerate(messages)
        for key in ("role", "content")
        if not isinstance(message, Mapping) or not isinstance(message.get(key), str)
    ]
    refuse(faults, expected)
