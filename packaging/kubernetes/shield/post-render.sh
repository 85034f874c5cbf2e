#!/bin/sh
# Helm's post-renderer: applies the patches of this directory. README.md describes its use.
set -eu
here=$(cd "$(dirname "$0")" && pwd -P)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/all.yaml"
cp -r "$here" "$work/shield"
cat > "$work/kustomization.yaml" <<END
resources: [all.yaml]
components: [shield]
END
kubectl kustomize "$work"
