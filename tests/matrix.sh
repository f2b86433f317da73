#!/usr/bin/env bash
# The quick tests with the oldest packages that pyproject.toml allows on Python 3.11, and with the newest on each given Python.
#   tests/matrix.sh                 # 3.12 and 3.13, which uv finds or fetches
#   tests/matrix.sh 3.13            # newest packages on 3.13 alone
# Needs uv; an environment of some 6 GB at a time, made anew and removed. docs/how-to/install.md says what was run.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export FEDTAR_HOME="$scratch/home" HF_HUB_OFFLINE=1 PYTHONPATH="$PWD"

tests_with() { # Python, uv's resolution
    uv venv -q --seed --python "$1" "$scratch/env"
    uv pip install -q --python "$scratch/env/bin/python" --resolution "$2" ".[test]"
    echo "== Python $1, $2"
    uv pip list -q --python "$scratch/env/bin/python" | grep -E "^(nvflare|torch|transformers|peft|timm|monai|numpy|pydicom) "
    PATH="$scratch/env/bin:$PATH" pytest -q || failed=1
    rm -rf "$scratch/env"
}

failed=0
[ $# -gt 0 ] || { tests_with 3.11 lowest-direct && set -- 3.12 3.13; }
for python in "$@"; do tests_with "$python" highest; done
exit $failed
