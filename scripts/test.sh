#!/usr/bin/env bash
# scripts/test.sh   Installs what is missing, builds, runs every test.
set -euo pipefail
cd "$(dirname "$0")/.."
# Where there is a CUDA toolkit its half is tested on an emulator, which needs a second compiler.
if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
    scripts/install_packages.sh clang
    scripts/install_cudnn_frontend.sh || echo "test: goes on without cuDNN's attention" >&2
else
    scripts/install_packages.sh
fi
exec make test NATIVE="${NATIVE:-1}"
