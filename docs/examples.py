"""What griffe, which reads the package for the API pages, is told of its own ways."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Show the section `Example:` as griffe's `Examples:`, which is code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")


class OfOneName(griffe.Extension):
    """Take the function, not the file, where both have one name (`fit` in `_fit/fit.py`)."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called when the package is loaded."""
        for module in (pkg, pkg["plans"], pkg["collectives"], pkg["optim"]):
            for name, member in list(module.members.items()):
                path = member.target_path.removeprefix("torch_shard.") if isinstance(member, griffe.Alias) else name
                try:
                    target = pkg[path]
                except KeyError:  # of another package
                    continue
                if isinstance(target, griffe.Module) and path != name and name in target.members:
                    module.members[name] = griffe.Alias(name, f"torch_shard.{path}.{name}", parent=module)
