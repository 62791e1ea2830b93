"""Programs as a person runs them: the examples of the documents, and a training that torchrun starts again."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import harmonaize
import pytest
from team import SOCKETS

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
DOCUMENTS = pathlib.Path(__file__).parents[3] / "docs"
GUIDE = DOCUMENTS / "python.md"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def ran(*words):
    environment = {**os.environ, "HARMONAIZE_SOCKET": SOCKETS[0], "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split("\n")[:-1]


@pytest.mark.parametrize("program", ["hello_torch.py", "hello.py"])
def test_hello_runs_by_the_guides_commands(program):
    blocks = re.findall(r"^```sh\n(.*?)^```$", (DOCUMENTS / "tenants.md").read_text(), re.M | re.S)
    wheel, *commands = next(block for block in blocks if f"examples/{program}" in block).splitlines()
    # It has run when these tests do, but for the time that a release takes.
    assert wheel == "cargo xtask wheel --release --build"
    outputs = os.environ.get("CARGO_TARGET_DIR", "target")
    script = "\n".join(commands).replace("target/wheel", f"{outputs}/wheel")
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    # What pip is to install is there.
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, "HARMONAIZE_SOCKET": SOCKETS[0], "PATH": path, **offline}
    shell = ["sh", "-euc", script]
    run = subprocess.run(shell, cwd=DOCUMENTS.parent, env=environment, capture_output=True, text=True, timeout=120)
    by = ", by harmonaize" if "torch" in program else ""
    # Both write to one pipe, and lines may meet.
    expected = [f"rank {rank} of 2: 1{by}" for rank in range(2)]
    assert run.returncode == 0 and all(line in run.stdout for line in expected), run.stdout + run.stderr


BY_GLOO = '''
import os
import torch
import torch.distributed as dist
from harmonaize.torch import _backend
from torch.testing._internal.common_distributed import MultiProcessTestCase

PARENT = os.getpid()


class ByGloo(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_all_reduce(self):
        self.all_reduce("gloo")

    def test_all_reduce_by_the_hosts_default(self):
        self.all_reduce(None)

    def all_reduce(self, backend):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(backend, rank=self.rank, world_size=self.world_size, store=store)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == 2 and len(_backend._live) == 1
        assert os.getppid() == PARENT, "a rank started from nothing"
        dist.destroy_process_group()
'''


def test_pytorchs_own_tests_of_gloo_go_by_this_backend_in_forked_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).with_name("as_gloo")))
    program = tmp_path / "by_gloo.py"
    program.write_text(BY_GLOO)
    lines(ran(sys.executable, "-m", "pytest", "--noconftest", "-c", "/dev/null", "-p", "as_gloo", str(program)))


# A program as a rank of two.
AS_RANK = "import os, runpy, sys; os.environ.update(RANK=sys.argv[1], WORLD_SIZE='2'); runpy.run_path(sys.argv[2])"


def test_hello_runs_without_torch():
    program = AS_RANK + "; assert 'torch' not in sys.modules"
    ranks = [ran(sys.executable, "-c", program, str(rank), str(EXAMPLES / "hello.py")) for rank in range(2)]
    said = [line for rank in ranks for line in lines(rank)]
    assert [line.split(", by")[0] for line in said] == ["rank 0 of 2: 1", "rank 1 of 2: 1"]


def statements(text):
    return [ast.unparse(one) for one in ast.parse(text).body]


def test_the_tutorials_first_programs_are_the_examples():
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCUMENTS / "tenants.md").read_text(), re.M | re.S)
    # The others go on from a program of the reader's.
    first = [block for block in map(statements, blocks) if block[0] in ("import harmonaize", "import torch")]
    programs = [statements((EXAMPLES / name).read_text())[1:] for name in ("hello_torch.py", "hello.py")]
    assert first == [program[: len(block)] for program, block in zip(programs, first, strict=True)]


def guide():
    """The sections of docs/python.md by their titles, and the code of each."""
    parts = re.split(r"^## (.+)$", GUIDE.read_text(), flags=re.MULTILINE)
    sections = {"": parts[0]} | dict(zip(parts[1::2], parts[2::2]))
    code = {title: "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)) for title, text in sections.items()}
    return sections, code


def calls(function):
    """A function of the stubs as the guide writes it: without `self` and types."""
    arguments = function.args
    for one in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
        one.annotation = None
    return ast.unparse(arguments).removeprefix("self").removeprefix(", ")


def test_the_guide_to_python_has_each_public_name():
    import harmonaize.torch

    sections, _ = guide()
    package = pathlib.Path(harmonaize.__file__).parent
    stubs = ast.parse((package / "_core.pyi").read_text()).body
    missing = [f"{name}: nowhere" for name in harmonaize.__all__ if f"`{name}" not in "".join(sections.values())]
    missing += [name for name in harmonaize.torch.__all__ if f"`{name}" not in sections["harmonaize.torch"]]
    for node in stubs:
        if isinstance(node, ast.FunctionDef) and f"`{node.name}({calls(node)})`" not in sections["Operation"]:
            missing.append(node.name)
        for member in node.body if isinstance(node, ast.ClassDef) else []:
            if not isinstance(member, ast.FunctionDef) or (member.name.startswith("_") and member.name != "__init__"):
                continue
            name = node.name if member.name == "__init__" else member.name
            shown = f"`{name}`" if member.decorator_list else f"`{name}({calls(member)})`"
            if shown not in sections[node.name]:
                missing.append(f"{node.name}: {shown}")
    for node in [one for file in ("_hook.py", "checkpoint.py") for one in ast.parse((package / "torch" / file).read_text()).body]:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            if f"`{node.name}({calls(node)})`" not in sections["harmonaize.torch"]:
                missing.append(node.name)
    for node in ast.parse((package / "_errors.py").read_text()).body:
        if isinstance(node, ast.ClassDef) and f"| `{node.name}` |" not in sections["Exceptions"]:
            missing.append(node.name)
    assert not missing, missing


def test_the_guide_to_python_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    _, code = guide()
    by_torch = tmp_path / "by_torch.py"
    by_torch.write_text(code.pop("harmonaize.torch"))
    lines(ran(*TORCHRUN, str(by_torch)))
    whole = tmp_path / "guide.py"
    whole.write_text("\n".join(code.values()))
    ranks = [ran(sys.executable, "-c", AS_RANK, str(rank), str(whole)) for rank in range(2)]
    printed = [lines(rank) for rank in ranks]
    assert printed[0][0] == "agreed: True" and all("f16" in out[-1] for out in printed), printed


def trained(launcher, folder, *arguments):
    folder.mkdir()
    program = [str(pathlib.Path(__file__).with_name("elastic.py")), arguments[0], str(folder), *arguments[1:]]
    lines(ran(*launcher, *program))
    return (folder / "losses").read_text(), (folder / "starts").read_text()


def test_a_training_whose_worker_is_killed_ends_as_that_of_one_process(tmp_path):
    whole, starts = trained([sys.executable], tmp_path / "whole", "none")
    assert starts == "1"
    launcher = [*TORCHRUN, "--max-restarts", "1"]
    assert trained(launcher, tmp_path / "killed", "harmonaize", "5") == (whole, "2")
