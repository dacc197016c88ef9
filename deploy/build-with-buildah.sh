#!/usr/bin/env bash
# Build the image without a Docker daemon, on a base of its own from Debian's packages, and see whether it keeps its
# promises (deploy/check_image.py).
#
#   sudo apt-get install buildah debootstrap
#   sudo deploy/build-with-buildah.sh [IMAGE] [buildah bud options...]
#
# for example, with pip's settings and a folder of wheels of this machine:
#   deploy/build-with-buildah.sh seqserve --build-arg TORCH_INDEX= \
#       --volume "$HOME/.config/pip:/root/.config/pip:ro" --volume /path/to/wheels:/path/to/wheels:ro
set -euo pipefail
cd "$(dirname "$0")/.."

image=${1:-seqserve}
shift $(($# > 0 ? 1 : 0))
base=localhost/seqserve-base
# vfs and chroot ask nothing of the kernel, so this also works inside a container.
export BUILDAH_ISOLATION=chroot
buildah() { command buildah --storage-driver vfs "$@"; }

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    root=$(mktemp -d)
    trap 'rm -rf "$root"' EXIT
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root"
    rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
    container=$(buildah from scratch)
    buildah copy --quiet "$container" "$root" /
    buildah commit --quiet --rm --format docker "$container" "$base"
fi

buildah bud --format docker --build-arg BASE_IMAGE="$base" --tag "$image" "$@" .
buildah images "$image"
deploy/check_image.py "$image"
