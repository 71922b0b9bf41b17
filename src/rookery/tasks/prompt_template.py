"""Prompts written as jinja2 templates: `Q: {{ question }}` over the fields of a row.

Templates run in jinja2's sandbox, a name that is not a field is an error, and nothing is escaped.
"""

from collections.abc import Mapping

import jinja2
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rookery.errors import TaskError

__all__ = ["check_prompt_template", "compile_prompt_template", "render_prompt_template"]

_ENVIRONMENT = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
)


def check_prompt_template(source: str) -> str:
    """The source itself; ValueError when it does not parse or uses no field."""
    try:
        names = find_undeclared_variables(_ENVIRONMENT.parse(source))
    except jinja2.TemplateError as error:
        raise ValueError(f"the template {source!r} is not jinja2: {error}") from None
    if not names:
        raise ValueError(
            f"the template {source!r} uses no field, so that all prompts would be the same: "
            "write a field as {{ question }}"
        )
    return source


def compile_prompt_template(source: str) -> jinja2.Template:
    """Compile a source that `check_prompt_template` has passed."""
    return _ENVIRONMENT.from_string(source)


def render_prompt_template(
    template: jinja2.Template, fields: Mapping[str, object], *, where: str
) -> str:
    """The prompt of one row; `where` names the row in the error."""
    try:
        return template.render(fields)
    except jinja2.UndefinedError as error:
        found = ", ".join(map(str, fields)) or "none"
        raise TaskError(
            f"{where}: the prompt template asks for something that is not there: {error}. "
            f"Fields found: {found}."
        ) from error
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise TaskError(f"{where}: the prompt template fails on this row: {error}") from error
