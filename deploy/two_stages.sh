#!/usr/bin/env bash
# The two stages of deploy/Dockerfile as virtual environments, without Docker and without a GPU:
#   deploy/two_stages.sh DIR [options of dualkv precompile]
# makes DIR/builder (everything), DIR/kernels (the artefacts), DIR/runtime (no compiler), and loads every artefact in the
# last. PYTHON names the interpreter of both (default python3), WHEEL a wheel of the package (default: built here).
set -euo pipefail
work=$(mkdir -p "${1:?expected a folder to work in}" && cd "$1" && pwd)
shift
if [ $# = 0 ]; then set -- --models qwen3-8b; fi
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
pip_install() { "$1/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" "${@:2}"; }

echo "== builder: the package with its dependencies, the compiler among them"
"$python" -m venv "$work/builder"
if [ -z "${WHEEL:-}" ]; then
    rm -rf "$work/source" "$work/wheel" && mkdir "$work/source"  # a copy, because a build leaves files where it runs
    cp -r "$root"/{codegen,cute_kernels,dualkv,pyproject.toml,README.md,LICENSE} "$work/source"
    "$work/builder/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheel" "$work/source"
    WHEEL=$(echo "$work"/wheel/dualkv-*.whl)
fi
pip_install "$work/builder" "$WHEEL"
(cd "$work" && builder/bin/dualkv precompile --out kernels "$@")
(cd "$work" && builder/bin/python "$root/deploy/runtime_library.py" library)

echo "== runtime: the same package without its dependencies, and what loading takes"
"$python" -m venv "$work/runtime"
pip_install "$work/runtime" --requirement "$root/deploy/requirements-runtime.txt"
pip_install "$work/runtime" --no-deps "$WHEEL"
cp -r "$work/library/." "$("$work/runtime/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

export DUALKV_KERNEL_DIR="$work/kernels" DUALKV_JIT=0
(cd "$work" && runtime/bin/dualkv precompile --check kernels "$@" && runtime/bin/python "$root/deploy/verify.py")
