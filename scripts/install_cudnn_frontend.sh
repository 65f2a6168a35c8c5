#!/usr/bin/env bash
# scripts/install_cudnn_frontend.sh   Gets the headers of cuDNN's front end into cudnn_frontend/, where the build looks for them, so that GPUs can also
# compute attention by cuDNN (--run.attention). Not needed where cudnn_frontend.h is installed; does nothing when it is here already, or no cuDNN.
set -euo pipefail
cd "$(dirname "$0")/.."
version=1.32.0

fail() { echo "install_cudnn_frontend: $*" >&2; exit 2; }
[ ! -e cudnn_frontend/include/cudnn_frontend.h ] || exit 0
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || exit 0
for folder in "$(dirname "$(realpath "$nvcc")")/../include" /usr/local/include /usr/include /usr/include/*-linux-gnu; do
    [ ! -e "$folder/cudnn.h" ] || found=1
done
[ -n "${found:-}" ] || exit 0

python3 -m pip --version >/dev/null 2>&1 || scripts/install_packages.sh python3-pip
work=cudnn_frontend.$$  # here, so that what is complete appears at once
trap 'rm -rf "$work"' EXIT
mkdir "$work"
python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$work" "nvidia-cudnn-frontend==$version" >"$work/log" 2>&1 ||
    fail "pip could not get nvidia-cudnn-frontend $version: $(tail -n 1 "$work/log")"
python3 -m zipfile -e "$work"/*.whl "$work/all"
rm -rf cudnn_frontend
mkdir "$work/cudnn_frontend"
mv "$work/all/include" "$work/cudnn_frontend/"
mv "$work/cudnn_frontend" .
echo "cuDNN's front end $version is in cudnn_frontend/"
