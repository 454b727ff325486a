"""Builds the pretended CUDA device into a folder: `python tests/pretend_cuda/build.py build/pretend_cuda`.

It needs g++, and torch's CUDA build with the headers of its nvidia-* packages. `missing()` names the first absent one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), *HERE.glob("include/**/*.h"), Path(__file__)])
_LINKED = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so")


def _torch() -> Path:
    """Returns torch's folder, without an import of torch, which takes seconds."""
    spec = find_spec("torch")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent


def _headers() -> Path:
    return _torch().parent / "nvidia/cu13/include"


def missing() -> str | None:
    """Returns the first requirement of the build that is missing; None if it can be built."""
    if sys.platform != "linux":
        return "Linux"
    if find_spec("torch") is None or not (_torch() / "lib/libtorch_cuda.so").exists():
        return "torch's build for CUDA"
    if not (_headers() / "cuda_runtime_api.h").exists():
        return "CUDA 13's headers, which the package nvidia-cuda-runtime brings"
    missing = [name for name in ("g++", "nm") if shutil.which(name) is None]
    return f"the program {missing[0]}" if missing else None


def _mark() -> str:
    """Returns a hash of everything that the libraries are made of."""
    content = [path.read_bytes() for path in [*SOURCES, _torch() / "version.py"]]
    return hashlib.sha256(b"".join(content)).hexdigest()


def _linked() -> set[str]:
    """Returns the functions of the runtime and of cuBLAS that torch's libraries link."""
    libraries = [str(_torch() / "lib" / name) for name in _LINKED]
    listed = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    return set(re.findall(r" U (\w+)@libcu(?:dart|blas|blasLt)\.so", listed.stdout))


def _looked_up() -> set[str]:
    """Returns the functions of the driver that torch's allocator looks up by name, all of them at its start."""
    library = (_torch() / "lib/libc10_cuda.so").read_bytes()
    return {name.decode() for name in re.findall(rb"(?<=\0)cu[A-Z]\w+(?=\0)", library)}


def _not_written(needed: set[str]) -> str:
    """Returns C++ for each function in `needed` that no source has: it prints its name and aborts."""
    sources = "".join(path.read_text() for path in HERE.glob("*.cpp"))
    written = set(re.findall(r"^EXPORT .*?\b(\w+)\(", sources, re.M))
    written |= set(re.findall(r"^(?:DOES_NOTHING|IS_A_PRODUCT)\((\w+)\)", sources, re.M))
    functions = (f'EXPORT int {name}() {{ return absent("{name}"); }}' for name in sorted(needed - written))
    absent = (
        "static int absent(const char* name) {\n"
        '    fprintf(stderr, "the pretended CUDA device has no %s: add it to tests/pretend_cuda\\n", name);\n'
        "    abort();\n}\n"
    )
    return f'#include <cstdio>\n#include <cstdlib>\n#include "counts.h"\n{absent}' + "\n".join(functions) + "\n"


def _compile(out: Path, *sources: Path, flags: list[str]) -> None:
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{HERE}", f"-I{HERE / 'include'}"]
    subprocess.run([*command, *map(str, sources), *flags, "-o", str(out)], check=True)


def build(out: Path) -> None:
    """Builds the libraries in `out` if a source or torch changed. Raises CalledProcessError if g++ fails."""
    mark = out / "mark"
    if mark.exists() and mark.read_text() == _mark():
        return
    (out / "lib").mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    nvidia = [f"-I{_headers()}", "-ldl"]
    (no_runtime := out / "no_runtime.cpp").write_text(_not_written(_linked()))
    (no_driver := out / "no_driver.cpp").write_text(_not_written(_looked_up()))
    _compile(out / "libpretend_cuda.so", HERE / "runtime.cpp", HERE / "cublas.cpp", no_runtime, flags=nvidia)
    preloaded = [f"-L{out}", "-lpretend_cuda"]
    _compile(out / "lib/libcuda.so.1", HERE / "driver.cpp", no_driver, flags=[*nvidia, *preloaded])
    _compile(out / "lib/libnvidia-ml.so.1", HERE / "nvml.cpp", flags=[])
    torch = _torch()
    include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    link = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    for name in ("cpu_kernels", "collectives"):
        _compile(out / f"{name}.so", HERE / f"{name}.cpp", flags=[*include, *link])
    mark.write_text(_mark())


if __name__ == "__main__":
    os.nice(10)
    if reason := missing():
        print(f"the pretended CUDA device is not built: it needs {reason}")
    else:
        build(Path(sys.argv[1]))
