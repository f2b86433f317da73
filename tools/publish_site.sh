#!/usr/bin/env bash
# Put a built site under VERSION/ of the branch gh-pages and push it, with the list of versions and a start page that
# leads to the newest release, or to dev before the first:
#   tools/publish_site.sh SITE VERSION      (X.Y of a release, or dev)
set -euo pipefail
site=$(realpath "$1")
version=$2
cd "$(dirname "$0")/.."
[[ $version =~ ^([0-9]+\.[0-9]+|dev)$ ]] || { echo "'$version' is no version of the site; give X.Y or dev" >&2; exit 1; }
export GIT_AUTHOR_NAME=docs GIT_AUTHOR_EMAIL=docs@localhost GIT_COMMITTER_NAME=docs GIT_COMMITTER_EMAIL=docs@localhost

empty=$(git commit-tree "$(git mktree < /dev/null)" -m "No pages yet")
pages=$(mktemp -d)
trap 'git worktree remove --force "$pages"' EXIT
git worktree add -q --detach "$pages" "$empty"
cd "$pages"
for attempt in 1 2 3 4 5; do  # whoever publishes at the same time may push first: then again, on top of that
    if git ls-remote --exit-code --heads origin gh-pages > /dev/null; then
        git fetch -q --depth 1 origin gh-pages
        before=$(git rev-parse FETCH_HEAD)
    else
        before=$empty
    fi
    git checkout -q --force --detach "$before"
    rm -rf "${version:?}"
    cp -r "$site" "$version"
    mapfile -t versions < <(ls -d dev [0-9]*.[0-9]* 2> /dev/null | sort -rV)
    newest=${versions[0]}
    [ "$newest" != dev ] || newest=${versions[1]:-dev}
    for name in "${versions[@]}"; do
        alias=; [ "$name" != "$newest" ] || alias='"latest"'
        printf '{"version": "%s", "title": "%s", "aliases": [%s]}\n' "$name" "$name" "$alias"
    done | paste -sd, | sed 's/.*/[&]/' > versions.json
    echo "<!doctype html><title>Documents</title><meta http-equiv=refresh content='0; url=$newest/'>" > index.html
    touch .nojekyll
    git add -A
    git diff --cached --quiet || git commit -qm "Pages of $version"
    if git push -q origin HEAD:refs/heads/gh-pages; then exit 0; fi
done
echo "'$version' is not published: git refused the push $attempt times, for the reason above; run this again" >&2
exit 1
