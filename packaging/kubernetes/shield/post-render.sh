#!/bin/sh
# Helm's post-renderer: helm upgrade --install nvdp nvdp/nvidia-device-plugin --post-renderer ./post-render.sh
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat > "$work/all.yaml"
cp -r "$here" "$work/shield"
cat > "$work/kustomization.yaml" <<END
resources: [all.yaml]
components: [shield]
END
kubectl kustomize "$work"
