"""Examples of docstrings, which stand under `Example:`, as griffe's section `Examples:`, so that they show as code."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section before docstrings are parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
