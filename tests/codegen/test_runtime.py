"""The host functions that kernels are linked with, over a CUDA runtime that is a stand-in: no GPU, real kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from codegen.spec import backward_specs
from tests.codegen.real import copied

HERE = Path(__file__).parent
SPEC = backward_specs("bf16", 64).postprocess
CALLS = """
import ctypes, sys
sys.modules["torch"] = None  # with which tvm-ffi would bring a CUDA of its own, where there is one
import tvm_ffi
from codegen import store
from codegen.spec import backward_specs

class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int * 2), ("ndim", ctypes.c_int),
                ("dtype", ctypes.c_uint8 * 2), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p),
                ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p)]

class OnDevice:
    "A tensor that says it lies on a GPU, or on the CPU if `kind` is 1."
    def __init__(self, shape, code, bits, device=0, kind=2):
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        self.shape, self.strides = ((ctypes.c_int64 * len(x))(*x) for x in (shape, strides))
        self.tensor = Tensor(1 << 20, (kind, device), len(shape), (code, bits), 1,
                             ctypes.addressof(self.shape), ctypes.addressof(self.strides))
        self.device = kind, device
    def __dlpack_device__(self):
        return self.device
    def __dlpack__(self, **_):
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.tensor), b"dltensor", None)

kernel = store.load(backward_specs("bf16", 64).postprocess)
def call(*device, more=(0.5,)):
    given = [OnDevice(*of, *device) for of in (([4096], 2, 32), ([64], 0, 32), ([64, 1, 64], 4, 16))]
    try:
        said = f"returned {kernel(*map(tvm_ffi.from_dlpack, given), *more)}"
    except Exception as e:
        said = f"{type(e).__name__} {e}"
    sys.stdout.write(f"{said}\\n")  # at once, whatever other threads write
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    copied(SPEC, folder)
    return folder


@pytest.fixture(scope="module")
def cuda(tmp_path_factory):
    """A folder with the stand-ins."""
    return _cuda(tmp_path_factory.mktemp("cuda"))


def _cuda(folder, *flags, names=("libcudart.so.13", "libcuda.so.1")):
    for name in names:
        words = ["gcc", *flags, "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run([*words, str(HERE / "fake_cuda.c")], check=True)
    return folder


def run(program: str, kernels: Path, cuda: Path, **environment: str) -> tuple[list[str], list[str]]:
    """Run a program. Returns its output, and the calls of CUDA."""
    environment |= {"DUALKV_KERNEL_DIR": str(kernels), "DUALKV_JIT": "0", "LD_LIBRARY_PATH": str(cuda)}
    done = subprocess.run(
        [sys.executable, "-c", CALLS + program], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_a_kernel_needs_nothing_of_the_dsl(kernels, cuda):
    (path,) = kernels.glob("*/kernel.so")
    dynamic = subprocess.run(["readelf", "-d", str(path)], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", dynamic)) == {"libtvm_ffi.so", "libc.so.6"}
    exported = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in exported.stdout.splitlines()] == [f"__tvm_ffi_{SPEC.symbol}"]
    program = "call()\nprint('cute_dsl' in open('/proc/self/maps').read(), 'cutlass' in sys.modules, store.counts)"
    assert run(program, kernels, cuda)[0] == ["returned None", "False False Counter({'kernel_dir': 1})"]


def test_arguments_are_checked(kernels, cuda):
    (on_the_cpu, too_few), calls = run("call(0, 1)\ncall(more=())", kernels, cuda)
    assert on_the_cpu.startswith("ValueError")
    assert "expected device_type=cuda" in on_the_cpu
    assert too_few.startswith("TypeError")
    assert "Expects 4 parameters" in too_few
    assert not calls


def test_the_first_call_loads_the_code_on_every_device_and_each_launches(kernels, cuda):
    said, calls = run("call()\ncall()\ncall(1)", kernels, cuda)
    assert said == ["returned None"] * 3
    assert calls.count("cudaLibraryLoadData") == calls.count("cudaGetDeviceCount") == 1
    attributes = [line for line in calls if line.endswith("cudaKernelSetAttributeForDevice")]
    assert [line[:8] for line in attributes] == ["device 0"] * 2 + ["device 1"] * 2
    launches = [line for line in calls if line.endswith("cudaLaunchKernelExC")]
    assert len(launches) == 3
    assert len(set(launches)) == 1
    assert re.match(r"ba55ed50, grid \d+, block 256, shared 18416: ", launches[0])
    assert [line for line in calls if line.endswith("cudaSetDevice")] == [f"device {d}: cudaSetDevice" for d in (1, 0)]


@pytest.mark.parametrize("other", [0, 1])
def test_a_gpu_of_another_kind_is_left_alone(kernels, cuda, other):
    """A kernel runs on the Hopper GPU beside it, and a call on the other one says that it has no code for it."""
    said, calls = run(f"call({1 - other})\ncall({other})\ncall({1 - other})", kernels, cuda, OTHER=str(other))
    assert said[::2] == ["returned None"] * 2
    assert said[1].startswith("RuntimeError CUDA error")
    attributes = [line for line in calls if "cudaKernelSetAttributeForDevice" in line]
    assert [line[:8] for line in attributes] == [f"device {1 - other}"] * 2


@pytest.mark.parametrize("theirs", [12, 13])
def test_pytorchs_runtime_comes_before_another_in_the_process(kernels, tmp_path, theirs):
    """A package of CUDA 13 may be imported beside a PyTorch of CUDA 12."""
    for major in (12, 13):
        _cuda(tmp_path, f'-DMARK="{major} "', names=[f"libcudart.so.{major}"])
    _cuda(tmp_path, names=["libcuda.so.1"])
    (tmp_path / "torch").mkdir()
    source, library = tmp_path / "torch" / "empty.c", tmp_path / "torch" / "libc10_cuda.so"
    source.touch()
    linked = ["-Wl,--no-as-needed", str(tmp_path / f"libcudart.so.{theirs}"), "-Wl,-soname,libc10_cuda.so"]
    subprocess.run(["gcc", "-shared", "-o", str(library), str(source), *linked], check=True)
    names = [f"libcudart.so.{25 - theirs}", str(library)]
    said, calls = run(f"for name in {names}: ctypes.CDLL(name)\ncall()", kernels, tmp_path)
    assert said == ["returned None"]
    marked = [line for line in calls if "cudaLibraryLoadData" in line or "cudaLaunchKernelExC" in line]
    assert len(marked) == 2
    assert all(f"{theirs} cuda" in line for line in marked), calls


@pytest.mark.parametrize(
    "name",
    ["cudaGetDeviceCount", "cudaLibraryLoadData", "cudaLibraryGetKernel", "cudaKernelSetAttributeForDevice",
     "cudaDeviceGetAttribute", "cuKernelGetAttribute"],
)  # fmt: skip
def test_an_error_while_loading_is_a_sentence_and_is_tried_again(kernels, cuda, name):
    said, calls = run("call()\nlibc = ctypes.CDLL(None)\nlibc.unsetenv(b'FAILS')\ncall()", kernels, cuda, FAILS=name)
    assert said == [
        "RuntimeError CUDA error cudaErrorIllegalAddress while a kernel was loaded: an illegal memory access was "
        "encountered",
        "returned None",
    ]
    assert sum(line.endswith("cudaLaunchKernelExC") for line in calls) == 1


@pytest.mark.parametrize("name", ["cudaGetDevice", "cudaLaunchKernelExC"])
def test_an_error_of_a_launch_is_a_sentence(kernels, cuda, name):
    said, _ = run("call()\nlibc = ctypes.CDLL(None)\nlibc.unsetenv(b'FAILS')\ncall()", kernels, cuda, FAILS=name)
    assert said == [
        "RuntimeError CUDA error cudaErrorIllegalAddress: an illegal memory access was encountered",
        "returned None",
    ]


def test_a_process_without_cuda_says_so_at_the_call(kernels, tmp_path):
    for name in ("libcudart.so.13", "libcudart.so.12"):
        (tmp_path / name).write_text("not a library: the loader looks no further")
    said, _ = run("call()", kernels, tmp_path)
    assert said[0].startswith("RuntimeError neither libcudart.so.13 nor libcudart.so.12 is in this process")
    old = tmp_path / "old"
    old.mkdir()
    said, _ = run("call()", kernels, _cuda(old, "-DOLD"))
    assert said == [
        "RuntimeError the CUDA runtime in this process has no cudaLaunchKernelExC: kernels need CUDA 12.8 or newer"
    ]


def test_the_runtime_in_the_process_comes_before_the_loaders(kernels, cuda, tmp_path):
    """PyTorch's libcudart lies in its own package's folder, where the loader does not look."""
    other = _cuda(tmp_path, names=["libcuda.so.1"])
    program = f"ctypes.CDLL({str(cuda / 'libcudart.so.13')!r}, mode=ctypes.RTLD_LOCAL)\ncall()"
    assert run(program, kernels, other)[0] == ["returned None"]


def test_threads_load_it_once(kernels, cuda):
    program = """
import threading
threads = [threading.Thread(target=call) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
"""
    said, calls = run(program, kernels, cuda)
    assert said == ["returned None"] * 8
    assert calls.count("cudaLibraryLoadData") == 1
