#!/usr/bin/env bash
# Build sdist and wheel into FOLDER, twice, and fail unless both builds are equal to the byte:
#   tools/build_release.sh FOLDER [TAG]     (a tag must name the package's version)
set -euo pipefail
folder=$(realpath -m "$1")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The date of every file in the archives: the commit's, or the newest file's outside a checkout.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y pyproject.toml)
export SOURCE_DATE_EPOCH
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q build
for turn in first second; do
    "$work/venv/bin/python" -m build -o "$work/$turn" . > "$work/log" || { cat "$work/log"; exit 1; }
    rm -rf build/lib build/bdist.*
done
cmp "$work"/first/*.whl "$work"/second/*.whl
if [ $# -gt 1 ] && ! ls "$work/first/fedtar_flare-${2#v}.tar.gz" > /dev/null 2>&1; then
    echo "The tag $2 does not name the version of $(ls "$work/first")" >&2
    exit 1
fi
mkdir -p "$folder"
cp "$work"/first/* "$folder"
