"""The code in the README runs."""

import pathlib
import re

from tests.system.test_tutorials import ROOT, run


def test_the_code_of_the_readme_runs(tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    program = tmp_path / "readme.py"
    program.write_text("\n".join(blocks))
    run(str(program), cwd=tmp_path)
