#!/usr/bin/env bash
# Makes .venv in the repository's root: the locked dependencies, the extra `tasks`, the development tools, and this
# package, editable. Needs python3 >= 3.11 and PyPI. Argument: the Python to use (default python3).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
uv_version=0.13.9

# With bytecode written a start of torch and transformers takes 9 s, without it 20 s.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME VIRTUAL_ENV CONDA_PREFIX

fail() {
    echo "setup: $*" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "$python not found; install Python 3.11 or newer, or: make setup PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old; install Python 3.11 or newer, then: make setup PYTHON=python3.11"

if uv --version >/dev/null 2>&1; then
    uv=uv
    [ -x .venv/bin/python ] || uv venv --quiet --python "$python" .venv
else
    uv=.venv/bin/uv
    if ! [ -x .venv/bin/python ]; then
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            fail "$python has no venv module; on Debian or Ubuntu: apt-get install python3-venv"
        "$python" -m venv .venv
    fi
    if ! "$uv" --version >/dev/null 2>&1; then
        .venv/bin/python -c 'import pip' 2>/dev/null || .venv/bin/python -m ensurepip >/dev/null
        .venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$uv_version"
    fi
fi

echo "setup: installing the locked dependencies into .venv; the first time this downloads a few GB"
# --inexact keeps what the lock does not name: uv itself, and what a developer has added.
UV_PROJECT_ENVIRONMENT=.venv UV_PYTHON_DOWNLOADS=never \
    "$uv" sync --quiet --frozen --inexact --extra tasks --compile-bytecode --python .venv/bin/python
.venv/bin/flexmarl --version
