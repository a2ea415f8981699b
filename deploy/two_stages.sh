#!/usr/bin/env bash
# The two stages of deploy/Dockerfile as virtual environments, without Docker and without a GPU:
#   deploy/two_stages.sh DIR [options of dualkv precompile]
# makes DIR/builder (with the compiler), DIR/kernels and the wheel of them in DIR/wheel, DIR/runtime (no compiler), and
# loads every kernel in the last. PYTHON names the interpreter of both (default python3), WHEEL a wheel of the package
# (default: built here), UV a uv that installs the packages in the place of pip.
set -euo pipefail
work=$(mkdir -p "${1:?expected a folder to work in}" && cd "$1" && pwd)
shift
if [ $# = 0 ]; then set -- --models qwen3-8b; fi
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
install() {
    local with=("$1/bin/python" -m pip install)
    if [ -n "${UV:-}" ]; then with=("$UV" pip install --python "$1/bin/python"); fi
    "${with[@]}" --quiet --constraint "$root/constraints.txt" "${@:2}"
}

echo "== builder: the package and the compiler"
"$python" -m venv "$work/builder"
rm -rf "$work/wheel"
if [ -z "${WHEEL:-}" ]; then
    rm -rf "$work/source" && mkdir "$work/source"  # a copy, because a build leaves files where it runs
    cp -r "$root"/{codegen,cute_kernels,dualkv,pyproject.toml,README.md,LICENSE} "$work/source"
    "$work/builder/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$work/wheel" "$work/source"
    WHEEL=$(echo "$work"/wheel/dualkv-*.whl)
fi
install "$work/builder" "$WHEEL[compile]"
(cd "$work" && builder/bin/dualkv precompile --out kernels --wheel wheel "$@")

echo "== runtime: the package and its kernels"
"$python" -m venv "$work/runtime"
install "$work/runtime" "$WHEEL" "$work"/wheel/dualkv_kernels-*.whl

export DUALKV_JIT=0
(cd "$work" && runtime/bin/dualkv precompile --check kernels "$@" && runtime/bin/python "$root/deploy/verify.py")
