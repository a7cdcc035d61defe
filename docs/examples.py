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
    """Find `fit` in `_fit/fit.py`: where a function has the name of its file, griffe takes the file."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called when the package is loaded."""
        for module in (pkg, pkg["plans"], pkg["collectives"], pkg["optim"]):
            for name, member in list(module.members.items()):
                if not isinstance(member, griffe.Alias) or not member.target_path.startswith("torch_shard._"):
                    continue
                file = f"{member.target_path}.{name}"
                if _has_file(pkg, member.target_path.split(".")[1:]):
                    module.members[name] = griffe.Alias(name, file, parent=module)


def _has_file(pkg: griffe.Module, parts: list[str]) -> bool:
    found: Any = pkg
    for part in parts:
        found = found.modules.get(part)
        if found is None:
            return False
    return parts[-1] in found.members
