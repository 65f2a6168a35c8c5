#!/usr/bin/env bash
# scripts/test.sh   Installs what is missing, builds, runs every test.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install_packages.sh
exec make test NATIVE="${NATIVE:-1}"
