#!/usr/bin/env bash
# Build the documentation site into build/site; any broken link fails. Needs the extra docs: pip install '.[docs]'
set -euo pipefail
cd "$(dirname "$0")/.."

# Pages link to files beside docs/, so the site has the repository's layout.
rm -rf build/pages
mkdir -p build/pages
cp -r --parents README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md CITATION.cff LICENSE docs provisioning \
    fedtar_flare/assets/small/README.md fedtar_flare/suite/suites build/pages
jupyter nbconvert --log-level WARN --to markdown --output-dir build/pages/examples examples/*.ipynb
sed -i "s/\.ipynb)/.md)/" build/pages/examples/*.md
zensical build --clean --strict
# The version switch stays on a page only where the list of pages names the start page by its folder.
sed -i "s|/index.html</loc>|/</loc>|" build/site/sitemap.xml
