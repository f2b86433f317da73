#!/bin/bash
# Builds the image on a base of Debian 12 made here, without a registry of images, and looks at it: size, account, bill of materials.
# Then a server and a hospital's site start from it, on loopback, with their kits mounted read-only, and do a short job; the image's own
# health check is asked before, while and after they run. As root, with Debian's buildah and debootstrap:
#   provisioning/try_image.sh [options of 'buildah bud', such as --build-arg CPU_INDEX=...]
# TRY_FOLDER needs about four times the image's size; everything in it is removed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d -p "${TRY_FOLDER:-/tmp}")
export TMPDIR=$work
b() { buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs "$@"; }
# ends what still runs in the image, and nothing else
leave() { for p in /proc/[0-9]*; do case $(readlink "$p/root") in "$work"/?*) kill -9 "${p#/proc/}" ;; esac; done; } 2> /dev/null
trap 'leave; b umount --all > /dev/null 2>&1; b rm --all > /dev/null 2>&1 || true; rm -rf --one-file-system "$work"' EXIT

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
config() { b inspect --type image --format "{{range .Docker.Config.$1}}{{println .}}{{end}}" fedtar | sed '/^$/d'; }
mapfile -t command < <(config Entrypoint; config Cmd)
mapfile -t check < <(config Healthcheck.Test | sed 1d)

mkdir -p "$work"/hospital "$work"/{localhost,hospital-a}/{workspace,state,cache}
cp provisioning/project-localhost.yml "$work/hospital/"
chmod 700 "$work"/{localhost,hospital-a}/* && chmod 755 "$work" && chown -R 10001:10001 "$work"/{hospital,localhost,hospital-a}
run() { b run --isolation chroot -v "$work/hospital:/hospital" "$@"; }
echo "account: $(run "$container" -- id -u)"
run "$container" -- bash -c '
  python3 -c "import json; [print(c[\"name\"], c[\"version\"]) for c in json.load(open(\"/opt/fedtar/sbom.json\"))[\"components\"]]" | sort > /tmp/bill
  { pip list --format freeze | sed "s/==/ /"; dpkg-query -W -f "\${Package} \${Version}\n"; python3 --version | tr P p; } | sort > /tmp/there
  echo "in the bill of materials: $(wc -l < /tmp/bill), of torch: $(grep ^torch /tmp/bill | tr "\n" " ")"
  diff /tmp/bill /tmp/there && echo "it lists what pip and dpkg list, no more and no less"'
run "$container" -- nvflare provision -p /hospital/project-localhost.yml -w /hospital/made > "$work/log" 2>&1 || { tail "$work/log"; exit 1; }
made=$work/hospital/made/fedtar_trial/prod_00
printf 'source: synthetic\n' > "$made/hospital-a/local/fedtar.yaml"
# of: a command in the container of a participant, whose kit is read-only
of() {
  run -v "$work/$1/workspace:/kit" -v "$made/$1/startup:/kit/startup:ro" -v "$made/$1/local:/kit/local:ro" \
    -v "$work/$1/state:/state" -v "$work/$1/cache:/cache" "$container" -- "${@:2}"
}
kits() { find "$made"/{localhost,hospital-a} -type f -exec sha256sum {} + | sort | sha256sum; }
before=$(kits)
of hospital-a bash -c 'touch /kit/startup/new /kit/local/new 2>&1 | grep -c "Read-only file system"' \
  | sed 's/^/folders of the kit that refuse a file: /'
# health: asks until the answer is the expected exit code
health() {
  for _ in {1..60}; do code=0; said=$(of "$1" "${check[@]}" 2> /dev/null) || code=$?; [ $code != "$2" ] || break; sleep 2; done
  echo "health of $1: $code, ${said##*$'\n'}"; [ $code = "$2" ]
}
for who in localhost hospital-a; do
  health $who 1
  of $who "${command[@]}" > "$work/$who.log" 2>&1 &
  health $who 0 || { tail "$work/$who.log"; exit 1; }
done
of hospital-a fedtar doctor --kit /kit | grep -E 'FAIL|checks$' || true
kit=/hospital/made/fedtar_trial/prod_00
run "$container" -- bash -c 'cd /hospital
  fedtar export --no-byoc --preset tiny --patients 12 --local-steps 2 -r 1 --time-steps 2 -o jobs --name study
  id=$(nvflare job submit -j jobs/study --startup-kit "$0" | sed -n "s/^job_id: //p")
  fedtar watch "$id" --kit "$0"' $kit/lead@hub.org > "$work/log" 2>&1 || { tail "$work/log"; exit 1; }
echo "job: $(tail -1 "$work/log")"
run "$container" -- nvflare system shutdown all --force --startup-kit $kit/admin@hub.org > "$work/log" 2>&1
wait
health hospital-a 1
health localhost 1
[ "$before" = "$(kits)" ] && echo "the kits are as they were"
