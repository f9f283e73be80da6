"""Every environment variable that gpudist reads is on docs/environment.md."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

# Names of variables in string literals.
READ = re.compile(
    r'"((?:GPUDIST|OMPI|PMI|PMIX|MPI|SLURM|TORCHELASTIC|MASTER|GLOO|CUBLAS|CUDA)_[A-Z_]+[A-Z]'
    r'|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE)["=]'
)
FILES = ("setup.py", "gpudist/world/launch.py", "gpudist/world/runtime.py")


def test_every_variable_is_on_the_page() -> None:
    text = (ROOT / "docs/environment.md").read_text(encoding="utf-8")
    read = {name for file in FILES for name in READ.findall((ROOT / file).read_text("utf-8"))}
    assert {"GPUDIST_TRANSPORT", "GPUDIST_CUDA", "PMI_RANK", "RANK", "CUDA_HOME"} <= read
    missing = sorted(name for name in read if f"`{name}`" not in text)
    assert not missing, f"not on docs/environment.md: {missing}"


def test_no_other_module_reads_variables_of_gpudist() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "gpudist").rglob("*.py")
        if re.search(r'(?:environ|environment)(?:\.get\(|\[)"GPUDIST_', path.read_text("utf-8"))
    }
    assert readers <= set(FILES)
