"""PyTorch's own tests of a backend, read from torch's wheel and run as they are but for the backend's name.

Each test has a process a rank, on two hosts. Why one is skipped is what torch says, but for those that need accelerators.
"""

import ast
import importlib.util
import multiprocessing
import os
import shutil
import sys
import tempfile
import types

import pytest
from team import SOCKETS

MODULE = "torch.testing._internal.distributed.distributed_test"
FOLDER = tempfile.mkdtemp(prefix="harmonaize-pytorch-")


@pytest.fixture(scope="module", autouse=True)
def folder():
    yield
    shutil.rmtree(FOLDER)


# What no backend in Python can pass, and why.
CANNOT = {
    "test_ddp_logging_data_cpu": "torch's log calls every backend that is not its own 'custom'",
}


def _settings(ranks):
    """What torch's tests read of the environment, as they are imported and as they run."""
    return {
        "BACKEND": "harmonaize",
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": FOLDER,
        "INIT_METHOD": f"file://{FOLDER}/store",
    }


def _marks(text):
    """Each test's decorators."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {one.name: [ast.unparse(mark) for mark in one.decorator_list] for one in functions}


def _accelerated(mark):
    return mark.startswith(("skip_if_no_gpu", "skip_if_lt_x_gpu")) and "allow_cpu" not in mark


def _tests(ranks, backend, wanted):
    """Torch's tests of a backend of its own, with our name in the place of that one's."""
    source = importlib.util.find_spec(MODULE)
    with open(source.origin) as file:
        text = file.read()
    text = text.replace(f'"{backend}"', '"harmonaize"').replace(f"dist.Backend.{backend.upper()}", '"harmonaize"')
    module = types.ModuleType(f"tests_of_{backend}_{ranks}")
    module.__file__ = source.origin
    sys.modules[module.__name__] = module
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in _settings(ranks).items():
            patch.setenv(variable, value)
        exec(compile(text, source.origin, "exec"), module.__dict__)

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            os.environ.update(_settings(ranks))
            super().setUp()
            # A process that starts from nothing would import torch first.
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank, name, *arguments, **options):
            os.environ.update(HARMONAIZE_SOCKET=SOCKETS[rank * len(SOCKETS) // ranks], HARMONAIZE_JOB=name[:40])
            super()._run(rank, name, *arguments, **options)

    marks = _marks(text)
    for name in filter(lambda name: name.startswith("test_"), dir(Tests)):
        test = getattr(Tests, name)
        test.__test__ = wanted(name, marks[name])
        if any(map(_accelerated, marks[name])):
            setattr(Tests, name, pytest.mark.skip(reason="needs accelerators")(test))
        elif name in CANNOT:
            setattr(Tests, name, pytest.mark.xfail(reason=CANNOT[name], strict=True)(test))
    return Tests


def _backends_that_can():
    """Has torch's tests know what the backend has: what gloo has."""
    from torch.testing._internal.common_distributed import DistTestCases

    for backends in DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add("harmonaize")
    DistTestCases.backend_feature["plugin"].add("harmonaize")


_backends_that_can()
WIDE = "skip_if_small_worldsize"
TestAsGloo = _tests(4, "gloo", lambda _, marks: WIDE not in marks)
TestWide = _tests(8, "gloo", lambda _, marks: WIDE in marks)
# Of torch's own backends, MPI alone exchanges on the host.
TestAsMpi = _tests(8, "mpi", lambda name, _: "all_to_all" in name and "cuda" not in name)
