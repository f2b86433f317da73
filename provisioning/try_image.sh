#!/bin/bash
# Builds the image on a base of Debian 12 made here, without a registry of images, and starts it: the size, the account, fedtar doctor,
# and a hospital's site whose kit is mounted read-only. As root, with Debian's buildah and debootstrap:
#   provisioning/try_image.sh [options of 'buildah bud', such as --build-arg CPU_INDEX=...]
# TRY_FOLDER needs about four times the image's size; everything in it is removed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d -p "${TRY_FOLDER:-/tmp}")
b() { buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"; }
trap 'b rm --all > /dev/null 2>&1 || true; rm -rf --one-file-system "$work"' EXIT

debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/base" > "$work/log"
container=$(b from scratch)
b add --quiet "$container" "$work/base" / > /dev/null
b commit --quiet --rm "$container" base > /dev/null
rm -rf --one-file-system "$work/base"

started=$SECONDS
b bud --isolation chroot --format docker --build-arg BASE=localhost/base "$@" -f provisioning/Dockerfile -t fedtar . > "$work/log" 2>&1 \
  || { tail -40 "$work/log"; exit 1; }
echo "built in $((SECONDS - started)) s"
container=$(b from --pull-never fedtar)
root=$(b mount "$container")
echo "size, MB: $(du -sm --one-file-system "$root" | cut -f1)"
echo "packages in /opt/fedtar/sbom.json: $(grep -c '"type": "library"' "$root/opt/fedtar/sbom.json")"

mkdir -p "$work"/hospital/{workspace,state,cache}
cp provisioning/project-localhost.yml "$work/hospital/"
chmod 700 "$work/hospital/workspace" && chmod 755 "$work" && chown -R 10001:10001 "$work/hospital"
run() { b run --isolation chroot -v "$work/hospital:/hospital" "$@"; }
echo "account: $(run "$container" -- id -u)"
run "$container" -- nvflare provision -p /hospital/project-localhost.yml -w /hospital/made > "$work/log" 2>&1 || { tail "$work/log"; exit 1; }
kit=$work/hospital/made/fedtar_trial/prod_00/hospital-a
printf 'source: synthetic\n' > "$kit/local/fedtar.yaml"
mounts=(-v "$work/hospital/workspace:/kit" -v "$kit/startup:/kit/startup:ro" -v "$kit/local:/kit/local:ro"
  -v "$work/hospital/state:/state" -v "$work/hospital/cache:/cache")
before=$(find "$kit" -type f -exec sha256sum {} + | sort | sha256sum)
run "${mounts[@]}" "$container" -- bash -c 'touch /kit/startup/new /kit/local/new 2>&1 | grep -c "Read-only file system"' \
  | sed 's/^/folders of the kit that refuse a file: /'
run "${mounts[@]}" "$container" -- fedtar doctor --kit /kit | tee "$work/log" | grep -E 'FAIL|checks$' || true
# no server is there: the site starts, and keeps trying to reach one
run "${mounts[@]}" "$container" -- timeout 60 tini -- bash /kit/startup/sub_start.sh --once > "$work/log" 2>&1 || true
echo "lines in the site's log: $(wc -l < "$work/hospital/workspace/log.txt"); the last: $(tail -1 "$work/hospital/workspace/log.txt" | cut -c1-160)"
[ "$before" = "$(find "$kit" -type f -exec sha256sum {} + | sort | sha256sum)" ] && echo "the kit is as it was"
